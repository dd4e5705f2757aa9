"""Warm ranks in processes of their own, for tests, verifications and drills: up in about a second, used many times.

A fork server has imported torch once; ranks are forked from it. The server itself never runs an op, so that no
thread of a maths library is lost in a fork. A process group is never rebuilt in a living rank: another world, or
a failure, takes fresh ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from fourfold.launch import pool_rank
from fourfold.launch.failure import FailureReport, in_order, signal_name
from fourfold.launch.guard import STACK_SIGNAL
from fourfold.launch.pulse import START
from fourfold.spec.errors import EXIT_BUG, EXIT_KILLED_BASE, Problem, RankFailed, SpecError
from fourfold.spec.words import counted

T = TypeVar("T")

# What every rank needs, and the slowest things it would else import by itself: torch's DDP takes in the compiler,
# one second per rank.
_PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "fourfold.launch.pool_rank",
]
_START_S = 60.0  # beside timeout_s, for the server's imports on a slow machine
_CAUSE_S = 1.0  # from a rank that could not go on without the others: time for the cause to show itself
_OTHERS_S = 0.1  # from any other failure: time for a second one of the same moment
_STACKS_S = 0.3
_END_S = 5.0


class RankPool:
    """`world` ranks in one process group, for as long as the pool lives: gloo on the CPU.

        with RankPool(2, timeout_s=30) as pool:
            sums = pool.run(add_up, 3)          # add_up(3) in both ranks; their results in order

    timeout_s: of one job, of one collective, and (with a minute more) of the start. threads: torch's, per rank.
    setup: "module:function", called once in each rank before the first job. device: "cuda" gives each rank a device
    of its own on this machine, NCCL beside gloo, and is refused in the ranks where there are too few.

    Ranks start at once, in the background. Any failure ends the pool: `alive` is False and its ranks are gone.
    """

    def __init__(
        self,
        world: int,
        *,
        timeout_s: float = 120.0,
        setup: str | None = None,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        """Start the ranks. SpecError if there is to be none, or `setup` is not of that form."""
        if world < 1 or (setup is not None and setup.count(":") != 1):
            raise _refused(world, setup)
        self.world = world
        self.timeout_s = timeout_s
        self._ready = False
        self._folder = Path(tempfile.mkdtemp(prefix="fourfold-pool-"))
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        # Before multiprocessing's own farewell, which waits for its processes.
        self._end = util.Finalize(
            self, _end, (self._processes, self._pipes, self._folder, os.getpid()), exitpriority=100
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        for rank in range(world):
            here, there = context.Pipe()
            place = pool_rank.Place(rank, world, str(self._folder), timeout_s, threads, setup, device)
            process = context.Process(target=pool_rank.serve, args=(there, place), name=f"rank{rank}")
            self._pipes.append(here)
            try:
                process.start()
                self._processes.append(process)
            except BaseException:
                self._end()
                raise
            finally:
                there.close()

    @property
    def alive(self) -> bool:
        """Whether the pool takes jobs: not closed, nothing failed so far, every rank's process there."""
        return self._end.still_active() and all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., T], *args: Any, per_rank: Sequence[Any] | None = None) -> list[T]:
        """function(*args) in every rank, results by rank; with per_rank, rank r gets per_rank[r] as last argument.

        function: of a module, importable in the ranks; arguments and result are pickled. torch.distributed is
        initialised in them, for a world of 1, too. Collectives: those of the function.
        Raises RankFailed, naming the rank that failed first, with its traceback and exit code, when any rank
        raises, dies, or has not answered within timeout_s; the pool is then gone.
        """
        assert per_rank is None or len(per_rank) == self.world, "one argument per rank"
        what = f"{function.__module__}.{function.__qualname__} in {counted(self.world, 'rank')}"
        if not self._end.still_active():
            raise RankFailed(
                Problem(
                    what, "the pool has ended", "it was closed, or a rank failed before", "a new RankPool"
                )
            )
        jobs = [
            pickle.dumps((function, args if per_rank is None else (*args, per_rank[rank])))
            for rank in range(self.world)
        ]
        try:
            if not self._ready:
                self._collect(f"start {counted(self.world, 'rank')}", self.timeout_s + _START_S)
                self._ready = True
            for pipe, job in zip(self._pipes, jobs, strict=True):
                with suppress(OSError):  # a dead rank is noticed below
                    pipe.send_bytes(job)
            answers = self._collect(what, self.timeout_s)
        except BaseException:
            self._end()  # an interrupt, too: answers of this job must not be taken for the next one's
            raise
        return [pickle.loads(answer) for answer in answers]

    def close(self) -> None:
        """End the ranks in good order; those that do not end within seconds are killed. Again: does nothing."""
        if not self._end.still_active():
            return
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(b"")
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def _collect(self, what: str, limit_s: float) -> list[bytes]:
        """One answer of every rank, by rank."""
        answers: dict[int, bytes] = {}
        failures: list[FailureReport] = []
        deadline = time.monotonic() + limit_s
        waiting = set(range(self.world))
        while waiting:
            objects: list[Any] = [self._pipes[rank] for rank in waiting]
            objects += [self._processes[rank].sentinel for rank in waiting]
            ready = wait(objects, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted(waiting):
                if self._pipes[rank] in ready or self._processes[rank].sentinel in ready:
                    answer = self._answer(rank)
                    waiting.discard(rank)
                    if isinstance(answer, FailureReport):
                        failures.append(answer)
                        settle_s = _CAUSE_S if answer.kind == "collective" else _OTHERS_S
                        deadline = min(deadline, time.monotonic() + settle_s)
                    else:
                        answers[rank] = answer
        if waiting and all(failure.kind == "collective" for failure in failures):
            failures += self._hung(waiting, limit_s)
        if failures:
            raise _failed(what, in_order(failures))
        return [answers[rank] for rank in range(self.world)]

    def _answer(self, rank: int) -> FailureReport | bytes:
        """What a rank has to say, dead or alive; it has something to say."""
        try:
            if self._pipes[rank].poll():
                answer = self._pipes[rank].recv_bytes()
                if answer[:1] == pool_rank.FAILED:
                    return FailureReport.model_validate_json(answer[1:])
                return answer[1:]
        except (EOFError, OSError):
            pass
        self._processes[rank].join(_CAUSE_S)
        code = self._processes[rank].exitcode
        if code is not None and code < 0:
            return _report(rank, "killed", "", EXIT_KILLED_BASE - code)
        return _report(rank, "raised", f"its process ended with exit code {code}", code or EXIT_BUG)

    def _hung(self, waiting: set[int], limit_s: float) -> list[FailureReport]:
        """The ranks without an answer; of these, only those that do not wait for others, if there are any."""
        stacks = {}
        for rank in waiting:
            pid = self._processes[rank].pid
            assert pid, "a rank that was started has a process"
            with suppress(OSError):
                os.kill(pid, STACK_SIGNAL)
        time.sleep(_STACKS_S)
        for rank in waiting:
            path = pool_rank.stack_file(str(self._folder), rank)
            stacks[rank] = path.read_text(errors="replace") if path.exists() else ""
        hung = {rank for rank, stack in stacks.items() if "distributed_c10d.py" not in stack} or waiting
        return [
            _report(
                rank,
                "hung",
                f"no answer within {limit_s:g} s",
                EXIT_KILLED_BASE + signal.SIGKILL,
                stacks[rank],
            )
            for rank in sorted(hung)
        ]


def _report(rank: int, kind: Any, message: str, exit_code: int, stack: str = "") -> FailureReport:
    return FailureReport(
        rank=rank,
        kind=kind,
        step=0,
        phase=START,
        message=message,
        exit_code=exit_code,
        time=time.time(),
        traceback=stack,
    )


def _failed(what: str, failures: Sequence[FailureReport]) -> RankFailed:
    """The cause, with the rank and exit code of it; the others are named."""
    cause, *others = failures
    verb = {"hung": "hung", "collective": "could not go on"}.get(cause.kind, "failed")
    if cause.kind == "killed":
        verb = f"was killed by {signal_name(cause.exit_code - EXIT_KILLED_BASE)}"
    found = f"rank {cause.rank} {verb}" + (f": {cause.message}" if cause.message else "")
    if others:
        found += f"  (after it: rank {', '.join(str(other.rank) for other in others)})"
    why = cause.traceback.rstrip() or "its process was gone before it could say more"
    return RankFailed(Problem(what, found, why, ""), cause.rank, cause.exit_code, cause.problems)


def _end(processes: list[ForkServerProcess], pipes: list[Connection], folder: Path, owner: int) -> None:
    """Kill what still lives, with all that it started, and leave nothing behind."""
    if os.getpid() != owner:
        return  # a fork of the owner holds copies, not ranks
    for process in processes:
        if process.is_alive() and process.pid:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet the leader of its group
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join(_END_S)
        with suppress(ValueError):  # still there: stuck in the kernel
            process.close()
    for pipe in pipes:
        pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


def _refused(world: int, setup: str | None) -> SpecError:
    return SpecError(
        Problem(
            asked=f"a pool of {counted(world, 'rank')}" + (f", set up by {setup}" if setup else ""),
            found=f"world = {world}" if world < 1 else f"setup = {setup!r}",
            why="a pool has one rank or more; setup is module:function",
            instead="RankPool(2, setup='package.module:function')",
        )
    )
