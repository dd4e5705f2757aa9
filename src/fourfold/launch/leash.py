"""Ends the ranks when the launcher is gone, however it went. Run by path, as a process of its own.

    python -I -S leash.py < pipe-from-the-launcher

Reads one process group per line; "-" before it lets go of a group whose number may soon be another's; "done" ends
it quietly. When the pipe closes without that word, or the launcher is no longer its parent, every group held is
killed: ranks, and what they started. It imports nothing of Fourfold, so that it is up in milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress


def main() -> None:
    """Hold the groups until told "done" or until the launcher is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # these are for the launcher; this process ends after it
    launcher = os.getppid()
    text = b""
    while os.getppid() == launcher:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        piece = os.read(0, 65536)
        text += piece
        if not piece:
            break
        if b"done" in text:
            return
    held: set[bytes] = set()
    for group in text.split():  # in order: a number may come again
        if group.startswith(b"-"):
            held.discard(group[1:])
        else:
            held.add(group)
    for group in held:
        with suppress(OSError, ValueError):
            os.killpg(int(group), signal.SIGKILL)


if __name__ == "__main__":
    main()
