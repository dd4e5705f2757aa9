"""What the exercises of resume have in common: the run they start from, what they show, and the claims they hold."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fourfold.checkpoint.choose import Choice
from fourfold.lab import resume_ranks
from fourfold.lab.resume_disk import Row, compared, interrupted, saved
from fourfold.launch.pool import RankPool
from fourfold.plan.run_plan import RunPlan
from fourfold.record.finding import Finding, verdict_of
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import EXIT_KILLED_BASE, RankFailed
from fourfold.train.resume import reopen_run

WORLD = 2
STEPS, SAVED, EARLIER = 20, 10, 5  # a run goes on from SAVED, or from the checkpoint before it

T = TypeVar("T")


@dataclass(slots=True)
class Shown:
    """One exercise.

    why: what is wrong with this way. seen: what came of it, where nobody checks. fourfold: what the product says.
    rows: the steps after SAVED, twice.
    """

    name: str
    title: str
    why: str
    rows: Sequence[Row] = ()
    seen: list[str] = field(default_factory=list)
    fourfold: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def first_difference(self) -> int | None:
        """The first step that is not the undisturbed run's."""
        return next((row.step for row in self.rows if not row.same), None)

    def entry(self) -> dict[str, Any]:
        """As it stands in the document."""
        return {
            "name": self.name,
            "title": self.title,
            "why": self.why,
            "first_difference": self.first_difference,
            "rows": [{**row._asdict(), "difference": row.difference} for row in self.rows],
            "seen": self.seen,
            "fourfold": self.fourfold,
            "verdict": verdict_of(self.findings),
        }


@dataclass(frozen=True, slots=True)
class Lab:
    """What every exercise starts from: the undisturbed run, and where its dropout was drawn from, rank by rank."""

    plan: RunPlan
    folder: Path
    undisturbed: RunDir
    drawn: Sequence[dict[int, str]]
    setup: str | None
    command: str

    @property
    def good(self) -> Path:
        """The checkpoint to go on from."""
        return saved(self.undisturbed, SAVED)

    def interrupted(self, name: str, *checkpoints: int) -> RunDir:
        """A copy of the undisturbed run as a kill right after step SAVED leaves it, with these checkpoints."""
        return interrupted(self.undisturbed, self.folder / name, SAVED, checkpoints)

    def in_ranks(self, function: Callable[..., T], *args: Any) -> list[T]:
        """In new processes."""
        return in_ranks(self.setup, function, *args)

    def go_on(self, run: RunDir, choice: Choice) -> list[Row]:
        """The product's way: go on with `run` from the checkpoint that was chosen. Raises RankFailed."""
        plan = self.plan.model_copy(update={"resume_from": str(choice.path)})
        reopen_run(plan, run, choice)
        self.in_ranks(resume_ranks.right, plan, run.path)
        return compared(self.undisturbed, run, SAVED)

    def go_on_carelessly(
        self, shown: Shown, run: RunDir, differs_from: int, *, epoch_anew: bool = False
    ) -> list[dict[int, str]]:
        """Go on with `run` from the files of its checkpoint without a check, and hold where it begins to differ.

        Returns where each step's dropout was drawn from, by rank.
        """
        folder = saved(run, SAVED)
        drawn = self.in_ranks(resume_ranks.careless, self.plan, run.path, folder, SAVED, epoch_anew)
        shown.rows = compared(self.undisturbed, run, SAVED)
        losses = [row.step for row in shown.rows if row.difference]
        largest = max(row.difference for row in shown.rows)
        self.fact(
            shown,
            "where nobody checks, it goes on without an error, as another run",
            f"losses differ from step {differs_from} on",
            f"they differ in {len(losses)} steps, from step {losses[0]} on, by up to {largest:.2g}"
            if losses
            else "they do not differ",
            losses == list(range(differs_from, STEPS + 1)),
        )
        return drawn

    def refused(self, shown: Shown, run: RunDir, *parts: str) -> None:
        """Hold that the product's load refuses the checkpoint of `run`, and says each of these."""
        told = self.in_ranks(resume_ranks.refused, self.plan, saved(run, SAVED))[0]
        shown.fourfold.append(f"does not load it: {told}" if told else "loads it, without a word")
        self.fact(
            shown,
            "the product does not load it, and says why",
            "… ".join(parts),
            told or "it was loaded",
            all(part in told for part in parts),
        )

    def killed(self, function: Callable[..., None], *args: Any) -> str:
        """How the ranks ended that did this: the name of the signal, or another end in words."""
        try:
            self.in_ranks(function, *args)
        except RankFailed as failure:
            number = failure.exit_code - EXIT_KILLED_BASE
            return signal.Signals(number).name if number > 0 else str(failure)
        return "in good order"

    def fact(self, shown: Shown, claim: str, expected: str, measured: str, holds: bool) -> None:
        """Add what was measured to an exercise's claims."""
        shown.findings.append(
            Finding(
                claim=f"{shown.name}: {claim}",
                kind="fact",
                expected=expected,
                measured=measured,
                verdict="pass" if holds else "fail",
                command=self.command,
            )
        )


def in_ranks(setup: str | None, function: Callable[..., T], *args: Any) -> list[T]:
    """function(*args) in WORLD new processes that have joined each other."""
    with RankPool(WORLD, setup=setup) as pool:
        return pool.run(function, *args)
