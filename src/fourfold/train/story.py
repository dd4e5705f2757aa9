"""What a run tells while it goes: a live line on a terminal, else whole lines; all of it in log.txt."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from fourfold.record.aloud import folded, say
from fourfold.record.problems import is_full, unwritable

QUIET_S = 30.0  # without a terminal, the longest silence before a line of progress


class Story:
    """Rank 0 speaks, to stderr and to `log`, in lines of at most 80 columns; the others are silent."""

    def __init__(self, log: Path, speaks: bool, may_lose: bool = False) -> None:
        """may_lose: a line for which the disk has no room is lost in `log`, where else it is a DataError."""
        self._may_lose = may_lose
        self._path = log
        self._log: TextIO | None = None
        if speaks:
            try:
                self._log = log.open("a", encoding="utf-8")
            except OSError as error:
                raise unwritable(log, error, "open the story", "nothing was written") from error
        self._live = False
        self._last = time.monotonic()

    def close(self) -> None:
        self._end_live_line()
        if self._log is not None:
            with suppress(OSError):  # a full disk: what could be said was said
                self._log.close()
            self._log = None

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._log is None:
            return
        self._end_live_line()
        text = folded(text)
        say(text)
        self._keep(text)

    def progress(self, text: str) -> None:
        """A line that the next one replaces on a terminal; elsewhere it stays."""
        if self._log is None:
            return
        if sys.stderr.isatty():
            say(f"\r\x1b[K{text[:79]}", end="")
            self._live = True
            self._keep(folded(text))
        else:
            self.say(text)

    def progress_if_silent(self, text: str) -> None:
        """The same, but only after 30 s without a line."""
        if time.monotonic() - self._last > QUIET_S:
            self.progress(text)

    def _keep(self, text: str) -> None:
        assert self._log is not None
        self._last = time.monotonic()
        try:
            self._log.write(text + "\n")
            self._log.flush()
        except OSError as error:
            if not (self._may_lose and is_full(error)):
                kept = "earlier lines are kept"
                raise unwritable(self._path, error, "write a line of the story", kept) from error

    def _end_live_line(self) -> None:
        if self._live:
            say("")
            self._live = False
