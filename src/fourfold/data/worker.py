"""A loader's worker: a process of its own that computes microbatches, asked and answered over two pipes.

It is a fresh interpreter without torch, small and quickly started. It does not decide when a run ends: it ignores
the signals that ask for one, and leaves when its parent closes the pipe or dies. The pipes carry pickles between
our own two processes: the pickled `Microbatches` first, then (step, micro), each answered in order.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass

from fourfold.data.microbatch import Microbatch, Microbatches
from fourfold.launch.stop import STOP_SIGNALS, held
from fourfold.spec.errors import DataError, Problem

_LEAVING_S = 5.0  # a worker that has not left by then is killed

# The search path is handed over, as a user's transform may lie where only the parent looks.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from fourfold.data.worker import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker answers in place of a microbatch: the error, if it can be pickled, and its traceback."""

    error: Exception | None
    traceback: str


class WorkerGone(DataError):
    """A worker has ended, or was killed, with answers outstanding: not the data's fault."""

    passing = True


class Worker:
    """The parent's end of a worker. Ask, then take the answers in the same order."""

    def __init__(self, microbatches: Microbatches) -> None:
        asked, ask = os.pipe()
        answers, answer = os.pipe()
        try:
            with held():  # until the child ignores them, so that none ends it while it starts
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(sys.path), str(asked), str(answer)],
                    pass_fds=(asked, answer),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a transform prints belongs to the story, not to the result
                )
        finally:
            os.close(asked)
            os.close(answer)
        self._ask, self._answers = os.fdopen(ask, "wb"), os.fdopen(answers, "rb")
        self._send(pickle.dumps(microbatches))  # as one message, read whole even where it cannot be opened

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, step: int, micro: int) -> None:
        """Have this microbatch computed; returns at once while fewer than about a thousand are unanswered."""
        self._send((step, micro))

    def answer(self) -> Microbatch:
        """Wait for the next answer. Raises what the worker raised, or DataError if it is gone."""
        try:
            answer = pickle.load(self._answers)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise WorkerGone(self._gone()) from error
        if not isinstance(answer, Failure):
            assert isinstance(answer, Microbatch)
            return answer
        raised = answer.error or RuntimeError("a loader's worker failed")
        raised.add_note(f"In a loader's worker (process {self.pid}):\n{answer.traceback}")
        raise raised

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        self._answers.close()
        with suppress(OSError):  # it may be gone already, with a request unread
            self._ask.close()
        try:
            self._process.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: object) -> None:
        try:
            pickle.dump(message, self._ask, protocol=5)
            self._ask.flush()
        except BrokenPipeError as error:
            raise WorkerGone(self._gone()) from error

    def _gone(self) -> Problem:
        try:
            ended = f"it ended with exit code {self._process.wait(_LEAVING_S)}"
        except subprocess.TimeoutExpired:
            ended = "it closed its pipe"
        return Problem(
            asked=f"a microbatch from the loader's worker with process id {self.pid}",
            found=ended,
            why="every microbatch is needed, in order",
            instead="--set data.workers=0 (the same batches, computed in the training process)",
        )


def serve(requests_fd: int, answers_fd: int) -> None:
    """The worker's life, in a process of its own."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_leave_with_parent, args=(requests_fd,), daemon=True).start()
    requests, answers = os.fdopen(requests_fd, "rb"), os.fdopen(answers_fd, "wb")
    try:
        microbatches = _opened(pickle.load(requests))
        while True:
            step, micro = pickle.load(requests)
            pickle.dump(_answer(microbatches, step, micro), answers, protocol=5)
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)


def _leave_with_parent(requests_fd: int) -> None:
    """End the process once nobody holds the other end of the pipe, even in the middle of a microbatch."""
    hang_up = select.poll()
    hang_up.register(requests_fd, 0)
    hang_up.poll()
    os._exit(0)


def _opened(message: bytes) -> Microbatches | Failure:
    """The work to do; opening its files again may fail, which is then the answer to every request."""
    try:
        microbatches: Microbatches = pickle.loads(message)
    except Exception as error:
        return _failure(error)
    return microbatches


def _answer(microbatches: Microbatches | Failure, step: int, micro: int) -> Microbatch | Failure:
    if isinstance(microbatches, Failure):
        return microbatches
    try:
        return microbatches.make(step, micro)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Failure:
    story = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Failure(None, story)
    return Failure(error, story)
