"""What is said to the person who waits, on stderr. Where nobody listens any more, it is silence, not an error."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def say(text: str, end: str = "\n") -> None:
    """Print on stderr at once. A reader that is gone (a closed terminal, a `tee` that Ctrl-C ended first) ends nothing.

    From then on stderr leads nowhere: a text that stayed in its buffer would still change the exit code at the end.
    """
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        with suppress(OSError, ValueError):  # ValueError: stderr is no file of its own
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)
