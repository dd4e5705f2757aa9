"""The pipeline exercise: who waits for whom under each of torch's schedules, by the clock and on real ranks.

The order of actions is torch's own. On a clock with stated costs it gives the bubble, beside the formula of the
schedule's source, and how many microbatches a rank holds at once. Then the same schedules run on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.lab import pipeline_ranks as ranks
from fourfold.launch.pool import RankPool
from fourfold.parallel.pipeline_order import orders_of
from fourfold.plan.pipeline_schedules import bubble_by_formula, why_not
from fourfold.plan.pipeline_time import EVEN, Timeline, timeline
from fourfold.record.finding import Finding, document, fact, write_findings
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.schedules import SCHEDULES, Schedule
from fourfold.verify.measure import GRADIENT_TOLERANCE, relative_gap, within, worst
from fourfold.verify.out import open_folder

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "fourfold.lab.pipeline/1"
MOST_MICROBATCHES = 32
LONGER = 0.5  # a step on real ranks may take this much longer than the clock says: messages, Python, a busy machine
BY_FORMULA = ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")
SHARDED_MICROBATCHES = 4


@dataclass(slots=True)
class Seen:
    """One schedule: its timeline, None where it does not take so many microbatches, and what came of it on ranks."""

    schedule: Schedule
    ranks: int
    microbatches: int
    drawn: Timeline | None = None
    ran: Timeline | None = None
    gap: float = 0.0  # of the worst gradient from one device's
    over: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.schedule.several else 1

    @property
    def same_order(self) -> bool:
        """Whether each real rank did what is drawn, in that order."""
        return self.drawn is not None and self.ran is not None and _orders(self.drawn) == _orders(self.ran)

    def at(self, microbatches: int) -> tuple[Timeline | None, dict[str, Any]]:
        """The timeline for so many microbatches, and its figures as they stand in the document."""
        name, several = self.schedule.name, self.stages_per_rank
        if why := why_not(name, self.ranks, microbatches):
            return None, {"microbatches": microbatches, "demands": why}
        found = timeline(orders_of(name, self.ranks, microbatches, several), EVEN)
        return found, {
            "microbatches": microbatches,
            "span": found.span,
            "bubble": found.bubble,
            "bubble_by_formula": bubble_by_formula(name, self.ranks, microbatches, several),
            "bubble_inside": found.bubble_inside,
            "most_alive": [found.most_alive(rank) / several for rank in range(self.ranks)],
        }

    def entry(self, unit_s: float) -> dict[str, Any]:
        """As it stands in the document."""
        ran = self.ran and {
            "span": self.ran.span / unit_s,
            "bubble": self.ran.bubble,
            "same_order": self.same_order,
            "gradient_gap": self.gap,
        }
        return {
            "name": self.schedule.name,
            "torch_class": self.schedule.torch_class,
            "source": self.schedule.source,
            "stages_per_rank": self.stages_per_rank,
            "figures": self.at(self.microbatches)[1],
            "timeline": self.drawn
            and [[[*slot.action, slot.start, slot.end] for slot in own] for own in self.drawn.ranks],
            "ran": ran,
            "over_microbatches": self.over,
        }


def lab_pipeline(
    *,
    nproc: int = 4,
    microbatches: int | None = None,
    unit_s: float = 0.02,
    out: Path | None = None,
    setup: str | None = None,
    command: str = "fourfold lab pipeline",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Put every schedule on the clock and on `nproc` real ranks, and hold one against the other.

    microbatches: of the timelines and the real steps (default: twice the ranks); the table has `nproc` times 1, 2, 4
    and 8. unit_s: what one forward of a stage sleeps. out: folder for the findings (default: the next free
    runs/verify-lab-<n>). setup: "module:function" called in every rank first. say: takes each line of the story.
    Returns the document fourfold.lab.pipeline/1. Raises SpecError for other than 2 to 4 ranks or 1 to 32 microbatches.
    """
    count = 2 * nproc if microbatches is None else microbatches
    _check(nproc, count)
    seen = [Seen(schedule, nproc, count) for schedule in SCHEDULES.values()]
    with open_folder(out, "lab") as folder:
        for one in seen:
            one.drawn, _ = one.at(count)
            one.over = [one.at(nproc * times)[1] for times in (1, 2, 4, 8)]
        _run(seen, unit_s, setup, say)
        sharded = _sharded(setup)
        say("all schedules with parameters sharded (ZeRO-3): done")
        findings = [*_findings(seen, unit_s, command), *_sharded_findings(sharded, command)]
        facts: dict[str, Any] = {
            "ranks": nproc,
            "microbatches": count,
            "costs": EVEN._asdict(),
            "unit_s": unit_s,
            "schedules": [one.entry(unit_s) for one in seen],
            "sharded": sharded,
        }
        path = write_findings(folder, "lab-pipeline", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, findings_file=str(path))


def _check(nproc: int, microbatches: int) -> None:
    problems = []
    if not 2 <= nproc <= 4:
        problems.append(
            Problem(
                asked=f"fourfold lab pipeline --nproc {nproc}",
                found="another number than 2, 3 or 4",
                why="the exercise runs that many processes here, and draws a line for each",
                instead=f"--nproc {2 if nproc < 2 else 4}",
            )
        )
    if not 1 <= microbatches <= MOST_MICROBATCHES:
        problems.append(
            Problem(
                asked=f"fourfold lab pipeline --microbatches {microbatches}",
                found=f"another number than 1 to {MOST_MICROBATCHES}",
                why="each is drawn, and really sent through the stages",
                instead=f"--microbatches {1 if microbatches < 1 else MOST_MICROBATCHES}",
            )
        )
    if problems:
        raise SpecError(problems)


def _run(seen: Sequence[Seen], unit_s: float, setup: str | None, say: Callable[[str], None]) -> None:
    """Fill in what real ranks did."""
    world = seen[0].ranks
    with RankPool(world, setup=setup) as pool:
        for one in seen:
            if one.drawn is None:
                continue
            name, several = one.schedule.name, one.stages_per_rank
            ran = pool.run(ranks.measure, name, one.microbatches, several, unit_s)
            one.ran = ranks.as_timeline(ran)
            right = ranks.one_device(world * several, ranks.input_of(one.microbatches))
            one.gap = _gap([own.gradients for own in ran], right)
            say(f"{name}: {one.ran.span / unit_s:.1f} units on real ranks, {one.drawn.span:g} by the clock")


def _sharded(setup: str | None) -> list[dict[str, Any]]:
    """Every schedule under FSDP2, parameters dropped after forward and kept: how far gradients are off."""
    with RankPool(4, setup=setup) as pool:
        found = pool.run(ranks.sharded_gradients, SHARDED_MICROBATCHES)
    entries = []
    for name, reshard in found[0]:
        stages = 4 if SCHEDULES[name].several else 2
        both = [ranks.one_device(stages, ranks.input_of(SHARDED_MICROBATCHES, replica)) for replica in (0, 1)]
        mean = {stage: (both[0][stage] + both[1][stage]) / 2 for stage in both[0]}
        gradients = [own[name, reshard] for own in found]
        missing = {stage for own in gradients for stage, gradient in own.items() if gradient is None}
        entries.append(
            {
                "name": name,
                "dropped_after_forward": reshard,
                "gap": _gap(gradients, mean),
                "stages_without_gradient": sorted(missing),
            }
        )
    return entries


def _gap(found: Sequence[Mapping[int, Tensor | None]], right: Mapping[int, Tensor]) -> float:
    """The worst gradient's gap; a missing one counts as zeros."""
    largest = max(float(one.abs().max()) for one in right.values())
    return worst(
        relative_gap((0 * right[stage] if one is None else one).numpy(), right[stage].numpy(), largest)
        for own in found
        for stage, one in own.items()
    )


def _orders(found: Timeline) -> list[list[Any]]:
    return [[slot.action for slot in own] for own in found.ranks]


def _findings(seen: Sequence[Seen], unit_s: float, command: str) -> list[Finding]:
    rows = [(one.schedule.name, row) for one in seen for row in one.over if row.get("bubble_by_formula")]
    known = [(name, row) for name, row in rows if name in BY_FORMULA]
    off = worst(abs(row["bubble"] - row["bubble_by_formula"]) for _, row in known)
    ran = [(one, one.drawn, one.ran) for one in seen if one.drawn is not None and one.ran is not None]
    other = [one.schedule.name for one, _, _ in ran if not one.same_order]
    longer = {one.schedule.name: real.span / unit_s / drawn.span - 1 for one, drawn, real in ran}
    gap = worst(one.gap for one, _, _ in ran)
    return [
        fact(
            "the bubble of torch's order of actions is that of the formula",
            "the same share of idle time, in " + ", ".join(dict.fromkeys(name for name, _ in known)),
            f"{len(known)} shares compared, the worst {off:.1e} off",
            within(off, 1e-9),
            tolerance="1e-9",
            command=command,
        ),
        fact(
            "real ranks do what is drawn, in that order",
            "the same actions in the same order on every rank, under every schedule",
            f"{len(ran)} schedules on {seen[0].ranks} ranks"
            + (f"; others: {', '.join(other)}" if other else ""),
            bool(ran) and not other,
            command=command,
        ),
        fact(
            f"a step takes as long on real ranks as the clock says, and at most {LONGER:.0%} longer",
            f"each forward of a stage sleeps {unit_s * 1000:g} ms, each half of a backward as long",
            ", ".join(f"{name} {more:+.0%}" for name, more in longer.items()),
            bool(ran) and all(-0.01 <= more <= LONGER for more in longer.values()),
            tolerance=f"{LONGER:.0%}",
            command=command,
        ),
        fact(
            "gradients are those of one device, under every schedule",
            f"a relative gap of at most {GRADIENT_TOLERANCE:g} in fp64",
            f"worst {gap:.1e}",
            bool(ran) and within(gap, GRADIENT_TOLERANCE),
            tolerance=f"{GRADIENT_TOLERANCE:g}",
            command=command,
        ),
    ]


def _sharded_findings(entries: Sequence[Mapping[str, Any]], command: str) -> list[Finding]:
    """The accident of torch 2.13, and where it does not happen."""
    split = {name for name, schedule in SCHEDULES.items() if schedule.splits}
    wrong = [one for one in entries if one["name"] in split and one["dropped_after_forward"]]
    others = [one for one in entries if one not in wrong]
    worst_other = worst(one["gap"] for one in others)
    return [
        fact(
            "schedules that split the backward give wrong gradients, without an error, where FSDP2 drops parameters "
            "after forward (torch 2.13)",
            "each of them further from one device than the tolerance",
            "; ".join(
                f"{one['name']} {one['gap']:.2g}"
                + (" (stages without any gradient)" if one["stages_without_gradient"] else "")
                for one in wrong
            ),
            bool(wrong) and not any(within(one["gap"], GRADIENT_TOLERANCE) for one in wrong),
            command=command,
        ),
        fact(
            "where FSDP2 keeps parameters after forward, and under the other schedules, sharded gradients are right",
            f"a relative gap of at most {GRADIENT_TOLERANCE:g} in fp64",
            f"worst of {len(others)}: {worst_other:.1e}",
            bool(others) and within(worst_other, GRADIENT_TOLERANCE),
            tolerance=f"{GRADIENT_TOLERANCE:g}",
            command=command,
        ),
    ]
