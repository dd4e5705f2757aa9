"""A stop that was asked for by a signal: remembered, and acted upon when the rank chooses."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from fourfold.spec.errors import EXIT_KILLED_BASE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECOND_AFTER_S = (
    2.0  # a signal this long after the first means: now. Sooner, it is the same one, delivered twice.
)


class StopRequest:
    """Context manager: SIGTERM, SIGUSR1 and SIGINT set `requested` instead of ending the process.

    A second one, `SECOND_AFTER_S` or more after the first, ends the process at once with 128+n. Earlier handlers
    come back on exit. Only the main thread can take signals: elsewhere this is a request that never comes.
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # the first signal that came
        self._at = 0.0
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come; the ranks agree on it before they act (it reaches them at different moments)."""
        return self.signal is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler before ours was not set from Python, and cannot be set again from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._at = number, time.monotonic()
        elif time.monotonic() - self._at >= SECOND_AFTER_S:
            os._exit(EXIT_KILLED_BASE + number)
