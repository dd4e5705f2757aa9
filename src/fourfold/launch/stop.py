"""A stop that is asked for by a signal: remembered, and acted upon when the process chooses.

A process that is to miss none is started with these signals held back (`held`): they wait until the handlers stand,
however long its imports take.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from fourfold.spec.errors import EXIT_KILLED_BASE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A signal this long after the first means: now. Sooner, it is the same one, delivered twice.
SECOND_AFTER_S = 2.0
_TICK_S = 0.05
_END = b"\0"  # to the listener; no signal has this number


@contextmanager
def held() -> Iterator[None]:
    """Hold back the stop signals of this thread, and of what it starts here: a child begins with them held back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SignalsTaken:
    """Context manager: SIGTERM, SIGUSR1 and SIGINT are noted in `seen` instead of ending the process.

    Noted are the first one and those that come `SECOND_AFTER_S` or more after it. Those that were held back come in
    once the handlers stand. Earlier handlers, and the hold, come back on exit. Only the main thread can take signals:
    elsewhere none is ever seen.

    A handler in Python runs when the main thread comes back from native code, perhaps long after its signal came: one
    wish, told twice, could look like two. So a thread watches the descriptor to which the interpreter writes each
    signal at once. It too may be kept waiting, and then takes the earliest moment at which a signal can have come.
    """

    def __init__(self, seen: list[tuple[int, float]] | None = None) -> None:
        """seen: a list to go on with, in place of a new one."""
        self.seen: list[tuple[int, float]] = [] if seen is None else seen  # (number, monotonic seconds)
        self._before: dict[int, Any] = {}
        self._held: set[int] = set()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._arrivals, self._told = os.pipe()
            os.set_blocking(self._told, False)
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
            self._woken = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
            _taking.append(self)
            before = {number: signal.signal(number, self._take) for number in STOP_SIGNALS}
            # None: the handler before ours was not set from Python, and cannot be set again from here.
            self._before = {number: signal.SIG_DFL if old is None else old for number, old in before.items()}
            self._held = set(signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)) & set(STOP_SIGNALS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        self._end(self._before)

    def ignore(self) -> None:
        """From now to the end of the process: what was asked for is done, and asking again must not undo it."""
        self._end(dict.fromkeys(self._before, signal.SIG_IGN))

    def _end(self, handlers: dict[int, Any]) -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if handlers:
            _taking.remove(self)
            signal.set_wakeup_fd(self._woken)
            os.write(self._told, _END)
            self._listener.join()
            self._close()

    def _close(self) -> None:
        os.close(self._arrivals)
        os.close(self._told)
        self._before, self._held = {}, set()

    def _leave_to_parent(self) -> None:
        """In a fork: it is no part of the wish, and its signals must not be taken for its parent's."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._close()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if not self.seen:
            self.seen.append((number, time.monotonic()))

    def _listen(self) -> None:
        """Tell a later wish from the first one; in a thread of its own."""
        empty = time.monotonic()  # nothing was there at this moment: what is found came after it
        while True:
            later = bool(self.seen) and empty >= self.seen[0][1] + SECOND_AFTER_S
            wait_s = _TICK_S if self.seen and not later else None
            asked = time.monotonic()  # not after it: this thread may have to wait until it can go on
            ready = select.select([self._arrivals], [], [], wait_s)[0]
            came = os.read(self._arrivals, 4096) if ready else b""
            if _END in came:
                return
            for number in came:
                if number in STOP_SIGNALS and later:
                    self._again(number)
                elif number in STOP_SIGNALS:
                    self._take(number, None)
            empty = asked

    def _again(self, number: int) -> None:
        self.seen.append((number, time.monotonic()))


class StopRequest(SignalsTaken):
    """Context manager: a signal sets `requested` instead of ending the process.

    A second one, `SECOND_AFTER_S` or more after the first, ends the process at once with 128+n, whatever it is doing.
    """

    @property
    def signal(self) -> int | None:
        """The first signal that came."""
        return self.seen[0][0] if self.seen else None

    @property
    def requested(self) -> bool:
        """Whether a signal has come; the ranks agree on it before they act (it reaches them at different moments)."""
        return bool(self.seen)

    @property
    def waited_s(self) -> float:
        """Seconds since the first signal; 0 if none has come."""
        return time.monotonic() - self.seen[0][1] if self.seen else 0.0

    def _again(self, number: int) -> None:
        os._exit(EXIT_KILLED_BASE + number)


_taking: list[SignalsTaken] = []  # those that are entered, the innermost last
_masks = threading.local()


def _before_fork() -> None:
    if _taking:
        _masks.kept = (signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS),)  # none may come in between


def _after_fork() -> None:
    if kept := _masks.__dict__.pop("kept", None):
        signal.pthread_sigmask(signal.SIG_SETMASK, kept[0])


def _in_fork() -> None:
    while _taking:
        _taking.pop()._leave_to_parent()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_fork)
