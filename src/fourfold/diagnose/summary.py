"""What a run came to, read from its record alone; works on a run that failed or is still going."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fourfold.record.reader import RunReader
from fourfold.record.starts import Start, Starts
from fourfold.spec.value import Value

Unknown = Literal["n/a"]
# As in the record, a number that is not finite is a word.
Number = float | Literal["nan", "inf", "-inf", "n/a"]
Ended = Literal["finished", "stopped by a signal", "failed", "unfinished"]


class Summary(Value):
    """A run in numbers, over all ranks; "n/a" is what the record does not say.

    Losses are per target. Rates are medians over the steps after the first tenth: processed tokens, those
    that are not padding, those that bear loss. `started` is the first event, in unix seconds; `wall_s` goes
    from there to the last one. A step is done when every rank has done it. `ended` is "unfinished" for a run
    that still goes or died without a word; `ended_why` is the failure that came first. `worlds`: numbers of ranks in
    order, where starts were on several. `ranks` is of the newest start, and `steps_by_rank` has an entry for each:
    fewer steps than are done where it was not there for all.
    """

    steps_asked: int
    steps_done: int
    first_loss: Number
    last_loss: Number
    best_loss: Number
    validation_loss: Number
    tokens_per_s: Number
    nonpadding_per_s: Number
    loss_tokens_per_s: Number
    started: Number
    wall_s: Number
    ranks: int | Unknown
    worlds: tuple[int, ...] = ()
    steps_by_rank: tuple[int | Unknown, ...]
    steps_agree: bool | Unknown
    ended: Ended
    ended_why: str


def summarize(run: RunReader | Path | str) -> Summary:
    """Sum up a run directory; DataError if it is none, or its record cannot be read."""
    reader = run if isinstance(run, RunReader) else RunReader(run)
    lines = list(reader.metrics())
    training = [line for line in lines if "loss" in line]
    losses = [line["loss"] for line in training]
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    ranks = {rank: _RankEvents(reader.events(rank)) for rank in reader.ranks()}
    world = _world(reader, ranks)
    starts = Starts(ranks[min(ranks)].starts if ranks else [Start(0, world)])
    taken = {
        rank: {step for step, of in one.steps.items() if of == starts.world(step)}
        for rank, one in ranks.items()
    }
    by_rank: tuple[int | Unknown, ...] = tuple(
        len(taken[rank]) if rank in ranks else "n/a" for rank in range(world)
    )
    several = len(starts.worlds) > 1
    newest = {rank: one for rank, one in ranks.items() if rank < world}  # others are of earlier starts
    times = [when for rank in ranks.values() for when in rank.first_and_last]
    ended, why = _ending(newest, world, reader.failures())
    return Summary(
        steps_asked=reader.spec().run.steps,
        steps_done=_steps_done(_reached(taken, starts) if several else by_rank, training),
        first_loss=losses[0] if losses else "n/a",
        last_loss=losses[-1] if losses else "n/a",
        best_loss=min((loss for loss in losses if not isinstance(loss, str)), default="n/a"),
        validation_loss=validation[-1] if validation else "n/a",
        tokens_per_s=_median_rate(training, "tokens_per_s"),
        nonpadding_per_s=_median_rate(training, "nonpadding_per_s"),
        loss_tokens_per_s=_median_rate(training, "loss_tokens_per_s"),
        started=min(times, default="n/a"),
        wall_s=max(times) - min(times) if times else "n/a",
        ranks=world or "n/a",
        worlds=starts.worlds if several else (),
        steps_by_rank=by_rank,
        steps_agree=_as_due(taken, starts) if several else _steps_agree(ranks, by_rank),
        ended=ended,
        ended_why=why,
    )


class _RankEvents:
    """What one rank's events say; read once, kept small (a long run has many)."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self.steps: dict[int, int] = {}  # each with the ranks of its start
        self.starts = [Start(0, 0)]
        self.first_and_last: list[float] = []
        self.world = 0
        self.failure: tuple[float, str] | None = None
        self.stopped = self.ended = False
        for event in events:
            self.first_and_last = [*self.first_and_last[:1], float(event["t"])]
            match event["kind"]:
                case "start":
                    self.world = int(event.get("world", 0))
                    # A resumed run takes back what came after its checkpoint, and how it ended then.
                    self.starts.append(Start(int(event["step"]), self.world))
                    self.steps = {step: of for step, of in self.steps.items() if step <= int(event["step"])}
                    self.failure, self.stopped, self.ended = None, False, False
                case "step":
                    self.steps[int(event["step"])] = self.world
                case "failure" if self.failure is None:
                    self.failure = (
                        float(event["t"]),
                        f"rank {event['rank']}: {event.get('error', 'no message')}",
                    )
                case "signal":
                    self.stopped = True
                case "end":
                    self.ended = True
                    self.stopped = self.stopped or event.get("ending") == "stopped"


def _world(reader: RunReader, ranks: Mapping[int, _RankEvents]) -> int:
    """How many ranks there should be: what was planned, else what the ranks said; 0 if nobody said."""
    planned = reader.plan().get("world")
    if isinstance(planned, int):
        return planned
    return max([rank + 1 for rank in ranks] + [events.world for events in ranks.values()], default=0)


def _steps_done(by_rank: Sequence[int | Unknown], training: Sequence[Mapping[str, Any]]) -> int:
    counts = [count for count in by_rank if count != "n/a"]
    if counts and len(counts) == len(by_rank):
        return min(counts)
    # Metrics are summed over all ranks: a step in them was done by every one.
    return max((int(line["step"]) for line in training), default=0)


def _reached(taken: Mapping[int, set[int]], starts: Starts) -> tuple[int | Unknown, ...]:
    """Of each rank of the newest start, the last step that it has done."""
    return tuple(
        max(starts.last.began, max(taken[rank], default=0)) if rank in taken else "n/a"
        for rank in range(starts.last.world)
    )


def _as_due(taken: Mapping[int, set[int]], starts: Starts) -> bool:
    """Whether each rank took the steps of the starts that it was in."""
    last = max((step for steps in taken.values() for step in steps), default=0)
    ranks = range(max(start.world for start in starts.starts))
    return all(taken.get(rank) == set(starts.due(rank, last)) for rank in ranks)


def _steps_agree(ranks: Mapping[int, _RankEvents], by_rank: Sequence[int | Unknown]) -> bool | Unknown:
    if not by_rank:
        return "n/a"
    return "n/a" not in by_rank and len({frozenset(events.steps) for events in ranks.values()}) == 1


def _ending(ranks: Mapping[int, _RankEvents], world: int, failures: str) -> tuple[Ended, str]:
    reported = sorted(events.failure for events in ranks.values() if events.failure is not None)
    if reported or _first_named(failures):
        # Who started the ranks knows better: a killed one says nothing, and its peers only that it is gone.
        return "failed", _first_named(failures) or reported[0][1]
    if len(ranks) < max(world, 1) or not all(events.ended for events in ranks.values()):
        return "unfinished", ""
    if any(events.stopped for events in ranks.values()):
        return "stopped by a signal", ""
    return "finished", ""


def _first_named(failures: str) -> str:
    """The first line of failures.md under its headings: it names who failed first, unless the run was started again."""
    if failures.startswith("# Started again since"):
        return ""
    lines = (line.strip() for line in failures.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def _median_rate(training: Sequence[Mapping[str, Any]], key: str) -> Number:
    """The first tenth of the steps is warm-up: caches, allocators, lazily built parts."""
    rates = [float(line[key]) for line in training[len(training) // 10 :] if key in line]
    return statistics.median(rates) if rates else "n/a"
