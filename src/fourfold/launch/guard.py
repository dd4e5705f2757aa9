"""Around a rank's work: whatever ends it is written down before the process is gone."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from fourfold.launch.failure import (
    FailureReport,
    describe,
    in_order,
    is_secondary,
    of_attempt,
    report_path,
)
from fourfold.launch.processes import LAUNCHER
from fourfold.launch.pulse import START, Pulse
from fourfold.launch.rank import ATTEMPT, Rank
from fourfold.record.aloud import say
from fourfold.record.calls import CALLS, read_calls, told_of
from fourfold.record.writer import write_json
from fourfold.spec.errors import EXIT_BUG, EXIT_KILLED_BASE, EXIT_UNREADABLE, FourfoldError, RankLate, Stopped

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STACK_SIGNAL = signal.SIGUSR2  # asks a rank to write where each of its threads stands
_STORE_S = 1.5  # for a word with the store; it may be gone, or busy in another thread


@contextmanager
def guard(rank: Rank, store: Store | None, run_dir: Path, pulse: Pulse | None) -> Iterator[None]:
    """Run a rank's work; an exception is reported, then the process ends with the error's exit code.

    The report goes to `failures/rank<r>.json` (a later attempt's to `failures/attempt<n>/`), to the store (for ranks
    on other machines) and, as one paragraph, to stderr; under our launcher rank 0 leaves the screen to it, if the
    launcher can read the report. The process ends at once, without the interpreter's own farewell, which would wait
    for collectives that can no longer complete, or abort. `Stopped` (75) and SystemExit end it so, too, without a
    report. `stacks/rank<r>.txt` takes the stacks on a crash, or when the launcher asks for them.
    Under our launcher nothing is begun if that is gone already, and on Linux the rank dies with it.
    Collectives: none.
    """
    if (launcher := os.environ.pop(LAUNCHER, None)) is not None:
        _die_with_parent()
        if launcher != str(os.getppid()):
            leave(EXIT_BUG)  # it died before that, and its leash may not know of this rank
    try:
        with _stacks(of_attempt(run_dir / "stacks", rank.attempt) / f"rank{rank.rank}.txt"):
            yield
    except SystemExit as leaving:
        leave(_exit_code(leaving))
    except Stopped as stopped:
        leave(stopped.exit_code)
    except BaseException as error:
        end(rank, store, run_dir, pulse, error)


_ending = threading.Lock()


def end(
    rank: Rank, store: Store | None, run_dir: Path, pulse: Pulse | None, error: BaseException
) -> NoReturn:
    """Report an error and end the process, from whatever thread; the first that comes is the one that counts."""
    with _ending:  # never let go
        report = _report(rank, run_dir, pulse, error)
        _tell(rank, store, run_dir, report, error)
        leave(report.exit_code)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; elsewhere only the leash does.

    The launcher starts ranks from its main thread. A kernel that refuses leaves it to the leash, too.
    """
    if sys.platform == "linux":
        death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal, ctypes.c_ulong(signal.SIGKILL))


@contextmanager
def _stacks(path: Path) -> Iterator[None]:
    """Where each thread stands is written to `path` on a crash, or when STACK_SIGNAL comes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        faulthandler.enable(file)
        faulthandler.register(STACK_SIGNAL, file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACK_SIGNAL)
            faulthandler.disable()


def _report(rank: Rank, run_dir: Path, pulse: Pulse | None, error: BaseException) -> FailureReport:
    if isinstance(error, FourfoldError):
        code = error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        code = EXIT_KILLED_BASE + signal.SIGINT
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        code = EXIT_UNREADABLE
    else:
        code = EXIT_BUG
    message = describe(error)
    if is_secondary(error) and not isinstance(error, FourfoldError):
        message = "\n".join(filter(None, (message, told_of(read_calls(run_dir / CALLS)))))
    return FailureReport(
        rank=rank.rank,
        kind="hung" if isinstance(error, RankLate) else "collective" if is_secondary(error) else "raised",
        step=pulse.step if pulse else 0,
        phase=pulse.phase if pulse else START,
        message=message,
        exit_code=code,
        time=time.time(),
        traceback="".join(traceback.format_exception(type(error), error, _from_caller(error))),
        passing=isinstance(error, FourfoldError) and error.passing,
        problems=error.problems if isinstance(error, FourfoldError) else (),
    )


def _tell(
    rank: Rank, store: Store | None, run_dir: Path, report: FailureReport, error: BaseException
) -> None:
    """Every place is tried; none may keep this rank from ending."""
    written = True
    path = report_path(run_dir, rank.rank, rank.attempt)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, report)
    except OSError:
        written = False
    ours = ATTEMPT in os.environ
    cause = [] if store is None else _exchange(rank, store, report, wait=not ours)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun names the cause only if it finds it there
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with suppress(OSError):
            get_error_handler().record_exception(error)
    if not (ours and written and rank.rank == 0):
        for failure in (report, *cause):
            say(failure.headline)


def _exchange(rank: Rank, store: Store, report: FailureReport, wait: bool) -> list[FailureReport]:
    """Leave the report in the store; who only lost the others looks there for the one that failed first."""
    found: dict[int, FailureReport] = {}

    def talk() -> None:
        with suppress(RuntimeError, ValueError):
            store.set(f"failure/{rank.rank}", report.model_dump_json())
            while wait and report.kind == "collective" and not found:
                for other in set(range(rank.world)) - {rank.rank}:
                    if store.check([f"failure/{other}"]):
                        told = FailureReport.model_validate_json(store.get(f"failure/{other}"))
                        if told.kind in ("raised", "hung"):
                            found[other] = told
                time.sleep(0.1)

    # A thread of its own: a store that hangs must not hang the rank.
    talker = threading.Thread(target=talk, daemon=True)
    talker.start()
    talker.join(_STORE_S)
    return list(in_order(found.values()))[:1]


def _from_caller(error: BaseException) -> TracebackType | None:
    """The traceback without this file's own frame on top."""
    top = error.__traceback__
    return top.tb_next if top is not None and top.tb_next is not None else top


def _exit_code(leaving: SystemExit) -> int:
    """As the interpreter takes it: None is 0, a text is printed and is 1."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    say(str(leaving.code))
    return EXIT_BUG


def leave(code: int) -> NoReturn:
    """End this process at once with `code`, output flushed, children killed.

    Also after a clean end: in the interpreter's farewell threads of torch's may abort a process that has done its
    work (seen once in 37 runs: "terminate called without an active exception").
    """
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
