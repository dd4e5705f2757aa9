"""What is said to the person who waits, on stderr. Where nobody listens any more, it is silence, not an error."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import wrap

WIDTH = 80


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


def folded(text: str) -> str:
    """`text` in lines of at most 80 columns, broken between words, what follows indented; a longer word stays whole.

    A line that begins with a space stays as it is: it is a part of an error, and perhaps a command to copy.
    """
    lines = []
    for line in text.split("\n"):
        whole = len(line) <= WIDTH or line.startswith(" ")
        lines += (
            [line]
            if whole
            else wrap(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        )
    return "\n".join(lines)


def say_and_keep(text: str, log: Path) -> None:
    """Say `text`, folded, and add it to the run's `log`; where that cannot be written, it was said."""
    text = folded(text)
    say(text)
    with suppress(OSError), open(log, "a", encoding="utf-8") as file:
        file.write(text + "\n")
