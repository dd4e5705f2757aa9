"""Why ranks ended, and which of them failed first.

    killed      by a signal that did not come from the launcher
    raised      an error of its own
    hung        no sign of life while the others waited
    left        ended well while the others still waited for it
    collective  could not go on without the others: a consequence, in another rank, of one of the above
    disagreed   finished while another stopped after a signal

In this order a failure is taken for the cause of the others; of one kind, the earliest. A collective names no
rank when a peer is gone, so that the cause can only be told from outside.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from fourfold.launch.pulse import START, Beat
from fourfold.spec.errors import EXIT_BUG, EXIT_DONE, EXIT_KILLED_BASE, EXIT_STOPPED, FourfoldError, Problem
from fourfold.spec.value import Value

Kind = Literal["killed", "raised", "hung", "left", "collective", "disagreed"]
_CAUSES: tuple[Kind, ...] = ("killed", "raised", "hung", "left", "collective", "disagreed")
_LOST = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "pair closure",
    "Broken pipe",
    "NCCL communicator was aborted",
)
_WATCHDOG_SHARE = 0.9  # of timeout_s: an abort after so long a wait is the collective watchdog's


class FailureReport(Value):
    """One rank's failure. step from 1, 0 = before the first; time in unix seconds; evidence: a file to read.

    passing: whatever its exit code says, the same may go well when it is tried again. problems: those of an error of
    ours.
    """

    rank: int
    kind: Kind
    step: int
    phase: str
    message: str
    exit_code: int
    time: float
    traceback: str = ""
    evidence: str = ""
    passing: bool = False
    problems: tuple[Problem, ...] = Field(default=(), strict=False)

    @property
    def headline(self) -> str:
        """Which rank, what, and where it was; further lines if the error has several parts."""
        at = f"at step {self.step} ({self.phase})" if self.step else f"before its first step ({self.phase})"
        said = f": {self.message}" if self.message else ""
        return f"rank {self.rank} {self._verb()} {at}{said}"

    def _verb(self) -> str:
        if self.kind == "killed":
            return f"was killed by {signal_name(self.exit_code - EXIT_KILLED_BASE)}"
        return {
            "raised": "failed",
            "hung": "hung",
            "left": f"ended with exit code {EXIT_DONE}",
            "collective": "could not go on",
            "disagreed": "went on to the end",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class End:
    """How the launcher saw one rank end.

    code: exit code, -n if signal n ended it, None if it was alive until the launcher killed it. at: unix
    seconds. log: the last lines of its output; None where it went to the screen.
    """

    rank: int
    code: int | None
    at: float
    beat: Beat | None = None
    report: FailureReport | None = None
    log: str | None = ""


def first_failure(
    ends: Sequence[End], timeout_s: float, forwarded: int | None = None
) -> tuple[FailureReport, ...]:
    """Every failure, the cause of the others first; none if all ranks ended with 0, or all with 75.

    timeout_s: the longest wait in one collective. forwarded: the signal the launcher passed on; a rank that
    died of it, not yet ready to take it, has not failed.
    """
    obeyed = () if forwarded is None else (-forwarded, EXIT_KILLED_BASE + forwarded)
    found = [failure for end in ends if end.code not in obeyed and (failure := _own(end, timeout_s))]
    if any(end.code in obeyed for end in ends) and {failure.kind for failure in found} == {"collective"}:
        return ()  # they lost the rank that died of the signal
    if not any(failure.kind in ("killed", "raised") for failure in found):
        found += [_hung(end) for end in ends if end.code is None and end.report is None]
    if {failure.kind for failure in found} == {"collective"}:
        found = [_late(failure, found) for failure in found]
        found += [_of(end, "left", "the others still waited for it") for end in ends if end.code == EXIT_DONE]
    if not found and any(end.code == EXIT_STOPPED for end in ends):
        stopped = ", ".join(str(end.rank) for end in ends if end.code == EXIT_STOPPED)
        why = f"rank {stopped} stopped after a signal; all must do the same"
        found = [_of(end, "disagreed", why) for end in ends if end.code == EXIT_DONE]
    return in_order(found)


def in_order(failures: Iterable[FailureReport]) -> tuple[FailureReport, ...]:
    """The cause first: by kind, then by time."""
    return tuple(sorted(failures, key=lambda failure: (_CAUSES.index(failure.kind), failure.time)))


def is_secondary(error: BaseException) -> bool:
    """Whether an exception only says that other ranks are gone, late or failed; our own classes say so themselves."""
    if isinstance(error, FourfoldError):
        return error.secondary
    if not isinstance(error, RuntimeError):
        return False
    if any(base.__module__ == "torch.distributed" for base in type(error).__mro__):
        return True  # DistError and its kin
    return any(mark in str(error) for mark in _LOST)


def describe(error: BaseException) -> str:
    """An exception in words, with the notes added to it; class and place are told unless it is one of ours."""
    text = str(error).partition(" This is typically caused by a remote worker")[0]  # gloo's advice, not ours
    if not isinstance(error, FourfoldError):
        text = ": ".join(part for part in (type(error).__name__, text) if part)
        if not is_secondary(error) and (frames := traceback.extract_tb(error.__traceback__)):
            inside = f"{os.sep}torch{os.sep}"  # where torch found it says less than which line called it
            last = next((frame for frame in reversed(frames) if inside not in frame.filename), frames[-1])
            text += f"\n  at {last.filename}:{last.lineno} in {last.name}"
    return "\n".join([text, *getattr(error, "__notes__", ())])


def of_attempt(folder: Path, attempt: int) -> Path:
    """Where in a folder the files of one attempt lie: those of the first in the folder itself."""
    return folder / f"attempt{attempt}" if attempt else folder


def report_path(run_dir: Path, rank: int, attempt: int = 0) -> Path:
    """Where a rank's report lies in the run directory."""
    return of_attempt(run_dir / "failures", attempt) / f"rank{rank}.json"


def read_reports(run_dir: Path, since: float, attempt: int = 0) -> dict[int, FailureReport]:
    """An attempt's reports, written since that moment (unix seconds); older ones are an earlier start's."""
    found = {}
    for path in of_attempt(run_dir / "failures", attempt).glob("rank*.json"):
        with suppress(OSError, ValidationError):
            report = FailureReport.model_validate_json(path.read_text(encoding="utf-8"))
            if report.time >= since:
                found[report.rank] = report
    return found


def signal_name(number: int) -> str:
    """SIGKILL for 9; "signal 99" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _own(end: End, timeout_s: float) -> FailureReport | None:
    """What this rank's end says by itself."""
    if end.code is not None and end.code < 0 and end.report is None:
        # NCCL's watchdog ends a rank that has waited too long in a collective by abort, without an exception.
        waited = end.at - end.beat.time if end.beat and not end.beat.patient else 0.0
        if end.code == -signal.SIGABRT and waited >= _WATCHDOG_SHARE * timeout_s:
            return _of(end, "collective", f"aborted after {waited:.0f} s in a collective")
        return _of(end, "killed", "", exit_code=EXIT_KILLED_BASE - end.code)
    if end.report is not None:
        return end.report
    if end.code in (None, EXIT_DONE, EXIT_STOPPED):
        return None
    if end.log is None:
        message = f"exit code {end.code}, no report; what it said, if anything, is further up on the screen"
        return _of(end, "raised", message, exit_code=end.code or EXIT_BUG)
    last = end.log.strip().rpartition("\n")[2] or "it said nothing"
    secondary = any(mark in end.log for mark in _LOST)
    message = f"exit code {end.code}, no report; last line of its output: {last}"
    return _of(end, "collective" if secondary else "raised", message, exit_code=end.code or EXIT_BUG)


def _hung(end: End) -> FailureReport:
    silent = f"{end.at - end.beat.time:.0f} s since its last sign of life" if end.beat else "no sign of life"
    failure = _of(end, "hung", silent, exit_code=EXIT_KILLED_BASE + signal.SIGKILL)
    return failure.model_copy(update={"time": end.beat.time}) if end.beat else failure


def _late(failure: FailureReport, all_lost: Sequence[FailureReport]) -> FailureReport:
    """Whoever came to a collective that the others had given up is told that they are gone, not that it waited."""
    waited = [other for other in all_lost if "Timed out" in other.message]
    last = max(all_lost, key=lambda other: other.time)
    if waited and failure is last and failure not in waited:
        return failure.model_copy(update={"kind": "hung", "message": f"it came too late. {failure.message}"})
    return failure


def _of(end: End, kind: Kind, message: str, exit_code: int = EXIT_BUG) -> FailureReport:
    step, phase = (end.beat.step, end.beat.phase) if end.beat else (0, START)
    return FailureReport(
        rank=end.rank, kind=kind, step=step, phase=phase, message=message, exit_code=exit_code, time=end.at
    )
