"""What the exercises of precision have in common: their Spec, their runs, what they show, and the claims they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fourfold.lab import precision_ranks as ranks
from fourfold.launch.pool import RankPool
from fourfold.plan.run_plan import RunPlan, make_run_plan
from fourfold.record.finding import Finding, fact, verdict_of
from fourfold.record.run_dir import RunDir, claim
from fourfold.record.writer import write_json, write_request
from fourfold.spec.errors import RankFailed
from fourfold.spec.load import load_spec
from fourfold.spec.ready import ready_text

SETTINGS = (
    'note="the precision exercise: a small decoder on the standard library\'s text"',
    "model.layers=2",
    "model.width=32",
    "data.sequence=64",
    "data.validation_fraction=0.0",
    "batch.global_batch=8",
    "batch.micro_batch=4",
    "optimizer.warmup_steps=5",
    "run.steps=32",
    "run.log_every=1",
    "run.validate_every=0",
)
FP16 = ("precision.compute=fp16",)
UNSCALED = (*FP16, "precision.scale_start=1.0", "precision.scale_every=1000000")

T = TypeVar("T")


@dataclass(slots=True)
class Shown:
    """One mistake.

    why: what is wrong with it. seen: what came of it, where nobody checks. fourfold: what the product does.
    """

    name: str
    title: str
    why: str
    seen: list[str] = field(default_factory=list)
    fourfold: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def entry(self) -> dict[str, Any]:
        """As it stands in the document."""
        return {
            "name": self.name,
            "title": self.title,
            "why": self.why,
            "seen": self.seen,
            "fourfold": self.fourfold,
            "verdict": verdict_of(self.findings),
        }


@dataclass(slots=True)
class Lab:
    """Where the exercises run.

    device: of those on one rank; what two ranks show they show on the CPU. pools: of warm ranks, by their number; one
    that failed is made again.
    """

    folder: Path
    setup: str | None
    command: str
    device: str = "cpu"
    pools: dict[int, RankPool] = field(default_factory=dict)

    def close(self) -> None:
        """End all ranks."""
        for pool in self.pools.values():
            pool.close()

    def plan(self, world: int, *sets: str) -> RunPlan:
        """The exercise's Spec, with `sets`, on so many ranks."""
        place = f"hardware.device={self._device(world)}"
        return make_run_plan(load_spec("tiny", [*SETTINGS, place, *sets]), world, tuple(self.command.split()))

    def run(self, name: str, plan: RunPlan) -> RunDir:
        """A run directory for it, with what was asked in it."""
        run = claim(self.folder / name)
        write_request(run, plan.spec, plan.provenance, ready_text("tiny"))
        write_json(run.plan_json, plan)
        return run

    def in_ranks(self, world: int, function: Callable[..., T], *args: Any) -> list[T]:
        """function(*args) in `world` processes that have joined each other."""
        if world not in self.pools or not self.pools[world].alive:
            self.pools[world] = RankPool(world, setup=self.setup, device=self._device(world))
        return self.pools[world].run(function, *args)

    def _device(self, world: int) -> str:
        return self.device if world == 1 else "cpu"

    def refused(self, shown: Shown, plan: RunPlan, mistake: str, *parts: str) -> None:
        """Hold that the product's own loop, with the mistake in it, ends with an error that says each of these."""
        told = ""
        try:
            told = self.in_ranks(plan.world, ranks.refused, plan, self.run(shown.name, plan).path, mistake)[0]
        except RankFailed as failure:
            told = "; ".join(ranks.in_words(problem) for problem in failure.told) or failure.problems[0].found
        shown.fourfold.append(
            f"its own loop with this mistake in it ends with an error: {told}"
            if told
            else "its own loop with this mistake in it trains to the end, without a word"
        )
        self.fact(
            shown,
            "the product's own loop does not train so, and says why",
            "… ".join(parts),
            told or "it trained to the end",
            bool(told) and all(part in told for part in parts),
        )

    def fact(self, shown: Shown, claim: str, expected: str, measured: str, holds: bool) -> None:
        """Add what was measured to a mistake's claims."""
        shown.findings.append(fact(f"{shown.name}: {claim}", expected, measured, holds, command=self.command))


def losses(wrong: Sequence[float], right: Sequence[float]) -> str:
    """A few of them with their steps, in words."""
    shown = (1, len(wrong) // 2, len(wrong))
    told = [", ".join(f"{values[step - 1]:.3f}" for step in shown) for values in (wrong, right)]
    return f"loss in steps {', '.join(map(str, shown))}: {told[0]} in place of {told[1]}"
