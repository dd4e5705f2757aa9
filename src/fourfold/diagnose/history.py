"""The course of a run through its attempts: how each ended and why, what was saved, what the breaks cost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from fourfold.launch.failure import FailureReport, report_path
from fourfold.record.lock import at_work
from fourfold.record.reader import RunReader, read_json, read_lines
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import EXIT_DONE, EXIT_STOPPED, DataError
from fourfold.spec.value import Value

Ending = Literal["finished", "stopped by a signal", "failed", "without a word", "going on"]


class Attempt(Value):
    """One start of all ranks. Times in unix seconds; None: not recorded.

    ranks: how many; None if it did not come to a step. after_step: steps done when it took up the run; None if it did
    not come so far. reached: steps done at its end.
    why: what failed, or which signal. then: what the launcher made of it ("restart 1 of 3: …"). lost_s: from the end of
    the attempt before to its own first step. steps_again: steps it did that the one before had done.
    """

    number: int
    started: float | None
    ended: float | None
    ranks: int | None = None
    after_step: int | None
    reached: int | None
    ending: Ending
    exit_code: int | None
    why: str = ""
    then: str = ""
    lost_s: float | None = None
    steps_again: int = 0


class Saved(Value):
    """A checkpoint that was published (error empty), or one that could not be."""

    attempt: int
    step: int
    checkpoint: str = ""
    seconds: float | None = None
    error: str = ""


class PassedOver(Value):
    """A folder that was not gone on from."""

    path: str
    why: str


class History(Value):
    """Every attempt in order; saves that succeeded, saves that failed; what was passed over when the run went on."""

    attempts: tuple[Attempt, ...] = Field(strict=False)
    saved: tuple[Saved, ...] = Field(strict=False)
    not_saved: tuple[Saved, ...] = Field(strict=False)
    passed_over: tuple[PassedOver, ...] = Field(strict=False)
    lost_s: float
    steps_again: int


def history(reader: RunReader) -> History:
    """Read the course of a run from its record alone; DataError if that cannot be read."""
    lives = _lives(reader)
    attempts = [_attempt(reader.dir, life) for life in lives]
    if attempts and attempts[-1].ending == "without a word" and at_work(reader.dir):
        attempts[-1] = attempts[-1].model_copy(update={"ending": "going on"})
    attempts = list(_after_each_other(attempts, lives))
    saves = [saved for life in lives for saved in life.saves]
    return History(
        attempts=tuple(attempts),
        saved=tuple(saved for saved in saves if not saved.error),
        not_saved=tuple(saved for saved in saves if saved.error),
        passed_over=tuple(_passed_over(reader.dir)),
        lost_s=sum(attempt.lost_s or 0.0 for attempt in attempts),
        steps_again=sum(attempt.steps_again for attempt in attempts),
    )


@dataclass(slots=True)
class _Life:
    """What the record has of one attempt: the launcher's lines, and the events of one rank."""

    number: int
    pid: int | None = None
    lines: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # the launcher's, by kind
    first: float | None = None
    last: float | None = None
    began: float | None = None
    ranks: int | None = None
    after_step: int | None = None
    reached: int | None = None
    ending: str = ""
    error: str = ""
    saves: list[Saved] = field(default_factory=list)

    def take(self, event: Mapping[str, Any]) -> None:
        """One event of the rank."""
        when, step = float(event["t"]), int(event["step"])
        self.first, self.last = when if self.first is None else self.first, when
        match event["kind"]:
            case "start":
                self.began, self.after_step, self.reached = when, step, step
                self.ranks = event.get("world")
            case "step":
                self.reached = step
            case "saved":
                seconds = event.get("seconds")
                name = str(event.get("checkpoint", ""))
                self.saves.append(Saved(attempt=self.number, step=step, checkpoint=name, seconds=seconds))
            case "not_saved":
                error = str(event.get("error")) or "no reason was recorded"
                self.saves.append(Saved(attempt=self.number, step=step, error=error))
            case "end":
                self.ending = str(event.get("ending", "finished"))
            case "failure":
                self.error = f"rank {event['rank']}: {event.get('error', 'no message')}"


def _lives(reader: RunReader) -> list[_Life]:
    """Attempts that a launcher of ours wrote down, and those that only a rank did, in order of their beginning."""
    told = _of_rank(reader)
    lives: dict[int, _Life] = {}
    for line in read_lines(reader.dir.attempts) if reader.dir.attempts.exists() else ():
        number = int(line["attempt"])
        life = lives.setdefault(number, _Life(number))
        life.lines[line["kind"]] = line
        if line["kind"] == "start":
            mine = [one for one in told if one.number == number and one.pid in (None, *line.get("pids", ()))]
            if mine:
                told.remove(mine[0])
                mine[0].lines = life.lines
                lives[number] = mine[0]
    return sorted([*lives.values(), *told], key=lambda life: (_begin(life) or 0.0, life.number))


def _of_rank(reader: RunReader) -> list[_Life]:
    """The events of the lowest rank that left any, cut where it joined."""
    lives: list[_Life] = []
    for event in reader.events(reader.ranks()[0]) if reader.ranks() else ():
        if event["kind"] == "joined" or not lives:
            lives.append(_Life(int(event.get("attempt", 0)), event.get("pid")))
        lives[-1].take(event)
    return lives


def _begin(life: _Life) -> float | None:
    return life.lines["start"]["t"] if "start" in life.lines else life.first


def _attempt(run: RunDir, life: _Life) -> Attempt:
    end = life.lines.get("end", {})
    ending, why = _ending(run, life, end)
    told = life.lines.get("restart") or life.lines.get("final") or {}
    return Attempt(
        number=life.number,
        started=_begin(life),
        ended=end.get("t", life.last),
        ranks=life.ranks,
        after_step=life.after_step,
        reached=life.reached,
        ending=ending,
        exit_code=end.get("exit_code"),
        why=why,
        then=told.get("told", ""),
    )


def _ending(run: RunDir, life: _Life, end: Mapping[str, Any]) -> tuple[Ending, str]:
    """How it ended, by the launcher's word before the rank's own."""
    code, signal = end.get("exit_code"), end.get("signal") or ""
    if end.get("failures"):
        return "failed", _cause(run, life.number, end["failures"][0])
    if code == EXIT_DONE or (code is None and life.ending == "finished"):
        return "finished", ""
    if code == EXIT_STOPPED or (code is None and life.ending == "stopped"):
        return "stopped by a signal", signal
    if code is None:
        return ("failed", life.error) if life.error else ("without a word", "")
    if signal:
        return "stopped by a signal", f"{signal}, killed before it was saved"
    return "failed", f"exit code {code}"


def _cause(run: RunDir, attempt: int, failure: Mapping[str, Any]) -> str:
    """The first line of what the rank's report says; the launcher's line where that is not there."""
    rank = failure.get("rank")
    try:
        report = FailureReport.model_validate(read_json(report_path(run.path, int(rank or 0), attempt)))
        return report.headline.partition("\n")[0]
    except (DataError, ValueError):
        return f"rank {rank} ({failure.get('kind')}) at step {failure.get('step')} ({failure.get('phase')})"


def _after_each_other(attempts: list[Attempt], lives: list[_Life]) -> Iterator[Attempt]:
    """What each break cost."""
    ended, reached = None, 0
    for attempt, life in zip(attempts, lives, strict=True):
        change: dict[str, Any] = {}
        on_its_way = life.began or attempt.ended or attempt.started
        if ended is not None and on_its_way is not None:
            change["lost_s"] = max(0.0, on_its_way - ended)
        if attempt.after_step is not None:
            again = min(reached, attempt.reached or 0) - attempt.after_step
            change["steps_again"] = max(0, again)
            reached = attempt.reached or 0
        ended = attempt.ended or ended
        yield attempt.model_copy(update=change)


def _passed_over(run: RunDir) -> Iterator[PassedOver]:
    """From the story: a line of its own when a person went on, words in brackets when the launcher did."""
    if not run.log.exists():
        return
    text = re.sub(r"\n  (?=\S)", " ", run.log.read_text(encoding="utf-8", errors="replace"))
    found: dict[PassedOver, None] = {}
    for line in text.splitlines():
        if line.startswith("passed over "):
            parts = [line.removeprefix("passed over ")]
        elif line.startswith("restart "):
            parts = re.findall(r"\(passed over (.+?)\)(?= \(passed over |$)", line)
        else:
            continue
        for path, _, why in (part.partition(": ") for part in parts):
            found[PassedOver(path=path, why=why)] = None
    yield from found
