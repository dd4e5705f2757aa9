"""Which processes are still there."""

from __future__ import annotations

import time
from pathlib import Path


def lives(pid: int) -> bool:
    """A zombie is dead: only its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(*pids: int) -> None:
    """Returns when none of them lives; fails, naming who does, if that takes far longer than it should."""
    until = time.monotonic() + 30
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.01)


def read_when_there(path: Path) -> str:
    """The text of a file that another process is about to write."""
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return path.read_text()
