"""The attempts of one launch: what a new one can mend, from where it goes on, how many may come to nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.launch.failure import FailureReport, report_path, signal_name
from fourfold.launch.stop import StopRequest
from fourfold.launch.story import FAILED, RESTARTED, in_file
from fourfold.launch.watch import Outcome
from fourfold.record.aloud import say, say_and_keep
from fourfold.record.problems import unreadable
from fourfold.record.reader import read_lines
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines, write_json, write_text
from fourfold.spec.errors import (
    EXIT_CHECK_FAILED,
    EXIT_KILLED_BASE,
    EXIT_NO_LAYOUT,
    EXIT_STOPPED,
    EXIT_UNREADABLE,
    EXIT_USAGE,
    FourfoldError,
)

# A wrong request, a check that does not hold, data that cannot be read: a new attempt would meet the same.
_FINAL = (EXIT_USAGE, EXIT_CHECK_FAILED, EXIT_NO_LAYOUT, EXIT_UNREADABLE)


@dataclass(frozen=True, slots=True)
class Point:
    """Where the next attempt goes on.

    step: steps done by then, 0: none. told: the same in words. prepare: makes the run directory ready for it; may
    raise a FourfoldError.
    """

    step: int
    told: str
    prepare: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Restarts:
    """When ranks that failed are to be started again.

    most: so many times in a row without progress, which is a `Point` of a later step than any before it. look: called
    while no rank lives; may raise a FourfoldError, and then nothing is started. step: steps done before the first
    attempt.
    """

    most: int
    look: Callable[[], Point]
    step: int = 0


class Attempts:
    """The attempts of one launch, numbered on through the run directory, each with its lines in `attempts.jsonl`."""

    def __init__(self, run_dir: Path, restarts: Restarts | None, command: Sequence[str], nproc: int) -> None:
        """command, nproc: the launch, for failures.md. DataError where the record cannot be read or kept."""
        self._run = RunDir(run_dir)
        self._restarts = restarts
        self._command = command
        self._nproc = nproc
        self._best = restarts.step if restarts else 0  # steps done at the latest point seen
        self._in_a_row = 0
        self._done = 0
        before = read_lines(self._run.attempts) if os.path.exists(self._run.attempts) else ()
        self.number = max((self._number_in(line) for line in before), default=-1) + 1
        self._record = JsonLines(self._run.attempts)

    def _number_in(self, line: Mapping[str, Any]) -> int:
        number = line.get("attempt", 0)
        if not isinstance(number, int):
            raise unreadable(self._run.attempts, f'"attempt" is {number!r}, not a whole number')
        return number

    def close(self) -> None:
        """Close the record."""
        self._record.close()

    def begin(self, pids: Sequence[int]) -> None:
        """The ranks were started. What failures.md told of last is then an earlier attempt's."""
        self._note("start", pids=list(pids))
        started_again(self._run)

    def end(self, outcome: Outcome, signals: list[tuple[int, float]], bad_at: float | None) -> Outcome | None:
        """Write down how an attempt ended; None if the ranks are to be started again, else how the launch ended.

        signals: those that came so far, as (number, monotonic seconds); more may be added meanwhile. bad_at: when the
        first rank ended badly. No rank lives during the call.
        """
        self._write_down(outcome, signals)
        outcome = replace(outcome, failures=tuple(_without_lost_file(one) for one in outcome.failures))
        try:
            final = self._judge(outcome, signals, bad_at)
        except (FourfoldError, OSError) as error:
            final = replace(outcome, told=f"not started again: {error}")
        if final is not None and final.told:
            with suppress(OSError):
                self._note("final", told=final.told)
        return None if final is None else replace(final, restarts=self._done)

    def _judge(
        self, outcome: Outcome, signals: list[tuple[int, float]], bad_at: float | None
    ) -> Outcome | None:
        if self._restarts is None or not outcome.failures:
            return outcome
        if signals and (bad_at is None or signals[0][1] <= bad_at):
            return outcome  # it failed while it stopped as it was asked to
        cause = outcome.failures[0]
        if not can_mend(cause):
            told = f"not started again: exit code {cause.exit_code} is what a new attempt would end with, too"
            return replace(outcome, told=told)
        with StopRequest(signals):  # a second signal ends this process at once: no rank lives
            point = self._restarts.look()
            if not signals:
                if (why := self._no_more(point)) is not None:
                    return replace(outcome, told=f"not started again: {why}")
                point.prepare()
        if signals:
            return _stopped(signals[0][0], point)
        self._go_on(point, cause)
        return None

    def _no_more(self, point: Point) -> str | None:
        """Why it ends here, if it does; counts."""
        assert self._restarts is not None
        if point.step == 0 < self._best:
            return f"the checkpoint of step {self._best} is gone, and every other"
        if point.step > self._best:
            self._best, self._in_a_row = point.step, 0
        if self._in_a_row >= self._restarts.most:
            times = f"{self._in_a_row} restarts in a row" if self._in_a_row > 1 else "1 restart"
            newer = f" newer than that of step {self._best}" if self._best else ""
            return f"{times} brought no checkpoint{newer}"
        return None

    def _go_on(self, point: Point, cause: FailureReport) -> None:
        assert self._restarts is not None
        first_line = cause.headline.partition("\n")[0]
        count, most = self._in_a_row + 1, self._restarts.most
        told = f"restart {count} of {most}: {first_line}; {point.told}"
        self._note("restart", in_a_row=count, most=most, after_step=point.step, told=told)
        self.number += 1
        self._in_a_row = count
        self._done += 1
        say_and_keep(told, self._run.log)

    def _write_down(self, outcome: Outcome, signals: Sequence[tuple[int, float]]) -> None:
        """A record that cannot be kept must not hide the failure: it is told on the screen, later."""
        failed = [(each.rank, each.kind, each.step, each.phase) for each in outcome.failures]
        try:
            self._note(
                "end",
                exit_code=outcome.exit_code,
                signal=signal_name(signals[0][0]) if signals else None,
                failures=[dict(zip(("rank", "kind", "step", "phase"), each, strict=True)) for each in failed],
            )
            for failure in outcome.failures:
                path = report_path(self._run.path, failure.rank, self.number)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, failure)
            if outcome.failures:
                self._add_to_failures(in_file(outcome.failures, self._command, self._nproc, self.number))
        except OSError as error:
            say(f"the failures could not be written down: {error}")

    def _add_to_failures(self, text: str) -> None:
        """The newest first."""
        path = self._run.failures_md
        before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        write_text(path, f"{text}\n{before}" if before else text)

    def _note(self, kind: str, **values: Any) -> None:
        self._record.write({"t": time.time(), "attempt": self.number, "kind": kind, **values})


def started_again(run: RunDir) -> None:
    """What failures.md told of last is from now on an earlier attempt's; it says so in its title."""
    with suppress(OSError):  # unreadable or not there
        text = run.failures_md.read_text(encoding="utf-8", errors="replace")
        if text.startswith(FAILED):
            write_text(run.failures_md, RESTARTED + text.removeprefix(FAILED))


def can_mend(cause: FailureReport) -> bool:
    """Whether a new attempt may go better: after a kill, a hang, a lost peer, an error of no class of ours."""
    return cause.passing or cause.exit_code not in _FINAL


def _without_lost_file(failure: FailureReport) -> FailureReport:
    """A file to read that could not be written (a full disk) is not named."""
    there = not failure.evidence or os.path.isfile(failure.evidence)
    return failure if there else failure.model_copy(update={"evidence": ""})


def _stopped(number: int, point: Point) -> Outcome:
    """A signal that came while no rank lived: what is saved is all there is, and it is whole."""
    came = f"{signal_name(number)} came while no rank lived"
    if point.step == 0:
        return Outcome(EXIT_KILLED_BASE + number, told=f"{came}, and nothing was saved")
    return Outcome(EXIT_STOPPED, told=f"{came}: another start {point.told}")
