"""The ranks of one attempt, watched from their start to the end of the last."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.launch.failure import (
    End,
    FailureReport,
    first_failure,
    of_attempt,
    read_reports,
    report_path,
    signal_name,
)
from fourfold.launch.guard import STACK_SIGNAL
from fourfold.launch.processes import RankProcess
from fourfold.launch.pulse import Beat, read_pulses
from fourfold.launch.stop import SECOND_AFTER_S
from fourfold.launch.story import last_lines
from fourfold.record.calls import CALLS, read_calls, told_of
from fourfold.spec.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_KILLED_BASE,
    EXIT_STOPPED,
    FourfoldError,
    refusal,
)

SETTLE_S = 3.0  # from the first bad end: time for the others to say what they saw
KILLED_SETTLE_S = 1.0  # the same where it was killed from outside: nothing that the others saw explains it
STALL_SHARE = 2.0  # of timeout_s: without any beat of any rank for so long, the group is stalled
_STACKS_S = 0.5  # for a hung rank to write its stacks
_PULSE_EVERY_S = 0.5
# Exit codes of ranks that others end. The remaining signals are faults of a program's own, such as a reduction of
# tensors of different shapes: there another rank's words may tell more.
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: the exit code for the caller, and the failures, the cause of the others first.

    exit_code: 0, 75, that of the first failing rank, or 128+n; told: one line if a signal cut it short, or why the
    ranks were not started again; restarts: how often they were.
    """

    exit_code: int
    failures: tuple[FailureReport, ...] = ()
    told: str = ""
    restarts: int = 0

    def refusal(self) -> FourfoldError | None:
        """What the ranks refused of the request, where that ended them before any step of any attempt."""
        if self.restarts or not self.failures or any(failure.step for failure in self.failures):
            return None
        cause = self.failures[0]
        if cause.kind != "raised" or cause.passing:
            return None
        found = refusal(cause.exit_code, cause.problems)
        if found is not None:
            found.add_note(f"raised by rank {cause.rank}:\n{cause.traceback}")
        return found


class Watch:
    """Decides when the ranks have ended, or must be ended, and what came of it.

    The rules, in this order:
    - a second signal, `SECOND_AFTER_S` or more after the first, or `grace_s` after the first: killed, 128+n;
    - a rank that ended badly gives the others `SETTLE_S` to end by themselves, `KILLED_SETTLE_S` if somebody killed
      it; then they are killed. If all that ended only lost the others in a collective, a rank still alive then is
      the one that hung;
    - a rank that stopped with 75 gives the others `grace_s`;
    - a stall: no beat of any living rank for `STALL_SHARE` × timeout_s. The clock stands still while a living
      rank has no pulse, has not made its first beat (it imports, opens data, compiles), or is in a phase that
      it called patient; so only a rank that beats regularly can be found stalled.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        run_dir: Path,
        timeout_s: float,
        grace_s: float,
        since: float,
        attempt: int = 0,
    ) -> None:
        self._processes = processes
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._since = since  # unix seconds: reports older than this are not of this start
        self._attempt = attempt
        self._forwarded: int | None = None
        # When the first bad end was seen, or else the end of all; monotonic seconds, as the next two.
        self.bad_at: float | None = None
        self._stopped_at: float | None = None
        self._changed_at = time.monotonic()
        self._looked_at = 0.0
        self._beats: dict[int, int] = {}

    def tick(self, signals: Sequence[tuple[int, float]]) -> Outcome | None:
        """Look once; None while the ranks may go on. signals: (number, monotonic seconds) of all that came so far."""
        codes = {process.rank: process.poll() for process in self._processes}
        now = time.monotonic()
        if signals and self._forwarded is None:
            self._forwarded = signals[0][0]
            for process in self._processes:
                process.send(self._forwarded)
        bad = self._bad(codes)
        if bad and self.bad_at is None:
            self.bad_at = now
        if None not in codes.values():
            return self._conclude(codes)
        if (cut := self._cut_short(signals, now)) is not None:
            RankProcess.kill_all(self._processes)
            return cut
        if self._must_end(codes, bad, now):
            return self._conclude(codes)
        return None

    def _cut_short(self, signals: Sequence[tuple[int, float]], now: float) -> Outcome | None:
        """Killed by a signal's rule, if it is time for that."""
        if not signals:
            return None
        first, at = signals[0]
        for number, again in signals[1:]:
            if again - at >= SECOND_AFTER_S:
                told = f"a second signal, {signal_name(number)}: all ranks were killed at once"
                return Outcome(EXIT_KILLED_BASE + number, told=told)
        if now - at < self._grace_s:
            return None
        slow = ", ".join(str(process.rank) for process in self._processes if process.poll() is None)
        told = f"rank {slow} had not ended {self._grace_s:g} s after {signal_name(first)}, and was killed"
        return Outcome(EXIT_KILLED_BASE + first, told=told)

    def _bad(self, codes: dict[int, int | None]) -> set[int]:
        """The exit codes of ranks that ended badly: not by a signal that was passed on."""
        bad = {code for code in codes.values() if code not in (None, EXIT_DONE, EXIT_STOPPED)}
        if self._forwarded is not None:
            bad -= {-self._forwarded, EXIT_KILLED_BASE + self._forwarded}
        return {code for code in bad if code is not None}

    def _must_end(self, codes: dict[int, int | None], bad: set[int], now: float) -> bool:
        settle = KILLED_SETTLE_S if bad & _FROM_OUTSIDE else SETTLE_S
        if EXIT_STOPPED in codes.values() and self._stopped_at is None:
            self._stopped_at = now
        return (
            (self.bad_at is not None and now - self.bad_at >= settle)
            or (self._stopped_at is not None and now - self._stopped_at >= self._grace_s)
            or self._stalled(codes, now)
        )

    def _stalled(self, codes: dict[int, int | None], now: float) -> bool:
        if now - self._looked_at < _PULSE_EVERY_S:
            return False
        self._looked_at = now
        pulses = read_pulses(self._run_dir / "pulse")
        living = {rank: pulses.get(rank) for rank, code in codes.items() if code is None}
        beats = {rank: beat.beats for rank, beat in living.items() if beat is not None and not beat.patient}
        if beats != self._beats or len(beats) < len(living):
            self._beats, self._changed_at = beats, now
        return now - self._changed_at >= STALL_SHARE * self._timeout_s

    def _conclude(self, codes: dict[int, int | None]) -> Outcome:
        """Say what came of it; those that still live are killed."""
        if self.bad_at is None:
            self.bad_at = time.monotonic()
        reports = read_reports(self._run_dir, self._since, self._attempt)
        pulses = read_pulses(self._run_dir / "pulse")
        ends = [
            self._end(process, codes[process.rank], pulses.get(process.rank), reports.get(process.rank))
            for process in self._processes
        ]
        failures = first_failure(ends, self._timeout_s, self._forwarded)
        if any(failure.kind == "hung" for failure in failures):
            for process in self._processes:
                process.send(STACK_SIGNAL)
            time.sleep(_STACKS_S)
        RankProcess.kill_all(self._processes)
        if failures:
            failures = (self._with_calls(failures[0]), *failures[1:])
            return Outcome(failures[0].exit_code, tuple(self._with_evidence(one) for one in failures))
        if self._forwarded is not None and any(
            code not in (EXIT_DONE, EXIT_STOPPED) for code in codes.values()
        ):
            told = f"{signal_name(self._forwarded)} came before every rank could stop in good order"
            return Outcome(EXIT_KILLED_BASE + self._forwarded, told=told)
        return Outcome(max((code for code in codes.values() if code is not None), default=EXIT_BUG))

    def _end(
        self, process: RankProcess, code: int | None, beat: Beat | None, report: FailureReport | None
    ) -> End:
        log = last_lines(process.log, since=process.log_start) if process.log else None
        return End(process.rank, code, process.ended_at or time.time(), beat, report, log)

    def _with_calls(self, failure: FailureReport) -> FailureReport:
        """What the last collectives of all ranks say of it, where it left, was lost, or was aborted by one."""
        aborted = failure.kind == "killed" and failure.exit_code == EXIT_KILLED_BASE + signal.SIGABRT
        told = told_of(read_calls(self._run_dir / CALLS))
        if not told or told in failure.message or not (aborted or failure.kind in ("left", "collective")):
            return failure
        return failure.model_copy(update={"message": "\n".join(filter(None, (failure.message, told)))})

    def _with_evidence(self, failure: FailureReport) -> FailureReport:
        stacks = of_attempt(self._run_dir / "stacks", self._attempt) / f"rank{failure.rank}.txt"
        log = log_path(self._run_dir, failure.rank)
        report = report_path(self._run_dir, failure.rank, self._attempt)
        if failure.traceback:
            evidence = report
        elif stacks.exists() and stacks.stat().st_size:
            evidence = stacks
        elif log.exists() and log.stat().st_size:
            evidence = log
        else:
            evidence = report
        return failure.model_copy(update={"evidence": str(evidence)})


def log_path(run_dir: Path, rank: int) -> Path:
    """Where the output of a rank other than 0 goes."""
    return run_dir / "logs" / f"rank{rank}.txt"
