"""From the gaps that ranks measured to findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from fourfold.record.finding import Finding, fact, not_tested
from fourfold.spec.errors import RankFailed
from fourfold.spec.spec import Spec
from fourfold.verify.adversary import sometimes_used
from fourfold.verify.boxes import uncovered
from fourfold.verify.deviation import Deviation
from fourfold.verify.measure import (
    GATE_EPS,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    PARAMETER_TOLERANCE,
    PARAMETER_TOLERANCE_OWN_EPS,
    relative_gap,
    within,
    worst,
)
from fourfold.verify.on_rank import RankGaps
from fourfold.verify.reference import Reference

Place = tuple[float, int, int, str]  # gap, step (from 0), rank, tensor


@dataclass(slots=True)
class Judge:
    """Findings of one equality check, and the numbers its document holds.

    worst_gate: over loss, gradients, norm and parameters at the gate's eps; worst_own_eps: over parameters at the
    Spec's, None if not run. tensors: by parameter, the worst gap of its gradient and of its final value.
    first_failed_step: how many steps must run to show the first failure. valid: by step, the valid targets of each
    share of the samples.
    """

    command: str
    changes: list[str]
    findings: list[Finding] = field(default_factory=list)
    worst_gate: float = inf
    worst_own_eps: float | None = None
    tensors: dict[str, dict[str, float]] = field(default_factory=dict)
    first_failed_step: int | None = None
    _rank_failed: bool = False
    _clipped: tuple[int, int] = (0, 0)
    valid: list[list[int]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(finding.verdict == "fail" for finding in self.findings)

    def gate(self, ranks: Sequence[RankGaps], reference: Reference) -> None:
        """Loss, gradients, norm of every step and the final parameters, of every rank, at the gate's eps."""
        steps = range(len(reference.steps))
        losses = [(_loss_gap(ranks, reference, step), step, 0, "loss") for step in steps]
        norms = [
            (
                relative_gap(rank.steps[step].norm, reference.steps[step].norm, 0.0),
                step,
                number,
                "global norm",
            )
            for number, rank in enumerate(ranks)
            for step in steps
        ]
        gradients = [
            (gap, step, number, name)
            for number, rank in enumerate(ranks)
            for step in steps
            for name, gap in rank.steps[step].gradients.items()
        ]
        parameters = _parameter_places(ranks)
        self._fact("loss of every step", losses, LOSS_TOLERANCE)
        self._counts(ranks, reference)
        self._fact("every gradient before clipping, every step, every rank", gradients, GRADIENT_TOLERANCE)
        self._fact("gradient norm of every step, every rank", norms, NORM_TOLERANCE)
        claim = f"every parameter after {len(steps)} AdamW steps, every rank, eps {GATE_EPS:g}"
        self._fact(claim, parameters, PARAMETER_TOLERANCE)
        self._corrections(ranks, reference)
        self._covered(ranks, reference)
        self._peers(ranks)
        self.worst_gate = worst(place[0] for place in (*losses, *gradients, *norms, *parameters))
        for kind, places in (("gradient", gradients), ("parameter", parameters)):
            for gap, _, _, name in places:
                held = self.tensors.setdefault(name, {})
                held[kind] = worst((held.get(kind, 0.0), gap))
        bounds = [p for p in (*losses, *gradients, *norms) if not within(p[0], GRADIENT_TOLERANCE)]
        self.first_failed_step = min((step + 1 for _, step, _, _ in bounds), default=None)
        self.valid = [[rank.steps[step].valid for rank in ranks if rank.counts] for step in steps]

    def own_eps(self, ranks: Sequence[RankGaps], eps: float) -> None:
        """The final parameters at the Spec's own eps."""
        places = _parameter_places(ranks)
        steps = len(ranks[0].steps)
        claim = f"every parameter after {steps} AdamW steps, every rank, the Spec's eps {eps:g}"
        self._fact(claim, places, PARAMETER_TOLERANCE_OWN_EPS)
        self.worst_own_eps = worst(place[0] for place in places)

    def clipping(self, reference: Reference, bound: float) -> None:
        """In how many steps the bound acted; of several references, in how many of all of theirs."""
        acted, steps = self._clipped
        acted += sum(step.norm > bound > 0.0 for step in reference.steps)
        self._clipped = (acted, steps + len(reference.steps))

    def sometimes(self, spec: Spec, reference: Reference) -> None:
        """In an adversarial Spec: whether the part that some rows use is used in some steps, and in others by none."""
        name = sometimes_used(spec)
        if name is None:
            return
        none = sum(name in step.without_gradient for step in reference.steps)
        steps = len(reference.steps)
        claim = "the check is sharp: a parameter is used in some steps, in others by no row on any rank"
        if 0 < none < steps:
            self._add(claim, "both", f"without a gradient in {none} of {steps} steps", True)
        else:
            self._open(claim, f"without a gradient in {none} of {steps} steps", "more steps: --steps 8")

    def rank_failed(self, failure: RankFailed) -> None:
        """A rank raised, died or hung: its error is the finding."""
        self._rank_failed = True
        self._add("every rank runs to the end", "no error", failure.problems[0].found, False)

    def first_deviation(self, found: Deviation | None) -> None:
        """Where it begins, or that a second pass did not show it; where a rank failed its error says enough."""
        if found is None and self._rank_failed:
            return
        self._add(
            "the first deviating value in execution order",
            "none: every value agrees with one device",
            str(found) if found is not None else "not seen in a second, traced pass (without the warm-up)",
            False,
        )

    def sharpness(self, spec: Spec, asked: Spec) -> None:
        """What the check was able to see, and what it was not."""
        acted, steps = self._clipped
        self._add(
            "the check is sharp: clipping acts", "in one step or more", f"in {acted} of {steps}", acted > 0
        )
        if len(self.valid[0] if self.valid else ()) > 1:
            unequal = sum(len(set(step)) > 1 for step in self.valid)
            self._add(
                "the check is sharp: ranks have unequally many valid targets",
                "in one step or more",
                f"in {unequal} of {len(self.valid)}; step 1: {', '.join(map(str, self.valid[0]))}",
                unequal > 0,
            )
        accumulation = spec.batch.accumulation or 1
        if accumulation > 1:
            self._add(
                "the check is sharp: gradients accumulate", "2 microbatches or more", f"{accumulation}", True
            )
        else:
            self._open(
                "accumulation over microbatches",
                "one microbatch a step, and batch.micro_batch = 1 cannot be halved",
                f"--set batch.global_batch={2 * (spec.batch.global_batch or 1)}",
            )
        if asked.precision.compute != "fp64":
            self._open(
                f"the kernels of {asked.precision.compute}",
                "fp64 judges the logic, not the arithmetic of the training's own dtype",
                f"the same comparison in {asked.precision.compute}, against a bound for its rounding",
            )

    def _counts(self, ranks: Sequence[RankGaps], reference: Reference) -> None:
        wrong = [
            f"step {step + 1}, rank {number}: {rank.steps[step].count} in place of {expected.count}"
            for step, expected in enumerate(reference.steps)
            for number, rank in enumerate(ranks)
            if rank.steps[step].count != expected.count
        ]
        total = sum(step.count for step in reference.steps)
        self._add(
            "the loss's denominator is the count of valid targets of the whole global batch",
            "equal on every rank in every step",
            wrong[0] if wrong else f"equal; {total:,} targets in all",
            not wrong,
        )

    def _corrections(self, ranks: Sequence[RankGaps], reference: Reference) -> None:
        """Of routers that have any: integers decide how they move, so they are the same to the bit."""
        if not reference.corrections and not any(rank.corrections for rank in ranks):
            return
        here = [  # of the routers that a rank has, by their other tensors
            {name for name in reference.corrections if _has(rank, name.rpartition(".")[0])} for rank in ranks
        ]
        wrong = [
            number
            for number, (rank, names) in enumerate(zip(ranks, here, strict=True))
            if rank.corrections != {name: reference.corrections[name] for name in names}
        ]
        self._add(
            "the corrections that balance the routers' experts after the last step",
            "those of one device on every rank that has the router, to the bit",
            f"others on rank {', '.join(map(str, wrong))}"
            if wrong
            else f"equal: {len(reference.corrections)} routers",
            not wrong,
        )

    def _covered(self, ranks: Sequence[RankGaps], reference: Reference) -> None:
        """Each rank judged its own boxes: together they must be everything, by arithmetic on the boxes alone."""
        shapes = dict(zip(reference.names, reference.shapes, strict=True))
        left = uncovered(shapes, [rank.boxes for rank in ranks])
        whole = sum(rank.boxes.get(n) == ranks[0].boxes.get(n) for rank in ranks for n in shapes)
        cut = "whole on every rank" if whole == len(ranks) * len(shapes) else "cut between the ranks"
        named = ", ".join(f"{name}: {count:,} elements" for name, count in list(left.items())[:5])
        self._add(
            "the boxes of all ranks cover every tensor",
            "every element is on some rank, and was compared",
            f"on none: {named}" if left else f"{len(shapes)} tensors covered, {cut}",
            not left,
        )

    def _peers(self, ranks: Sequence[RankGaps]) -> None:
        """Ranks that work on the same part of a batch must have the same loss of it; one of them counts."""
        speaker = {rank.share: number for number, rank in enumerate(ranks) if rank.counts}
        if len(speaker) == len(ranks):
            return
        gaps, silent = [], []
        for number, rank in enumerate(ranks):
            for step, own in enumerate(rank.steps if rank.has_loss else ()):
                if rank.share not in speaker:
                    silent.append(number)
                    continue
                said = ranks[speaker[rank.share]].steps[step]
                gap = relative_gap(own.loss_sum, said.loss_sum, 0.0) if own.valid == said.valid else inf
                gaps.append((gap, step, number, "loss"))
        claim = "ranks that work on the same samples report the same loss and targets"
        if silent:
            self._add(claim, "one of them counts", f"none counts for rank {silent[0]}", False)
        else:
            self._fact(claim, gaps, LOSS_TOLERANCE)

    def _fact(self, claim: str, places: Sequence[Place], tolerance: float) -> None:
        """One finding for many gaps, showing the worst."""
        if not places:
            self._add(claim, "equal to one device", "nothing to compare", False)
            return
        gap, step, rank, name = max(places, key=lambda place: place[0])
        beyond = sum(not within(place[0], tolerance) for place in places)
        measured = f"{gap:.2g} ({name}, step {step + 1}, rank {rank})"
        if beyond:
            measured += f"; {beyond} of {len(places)} values beyond"
        self._add(claim, "equal to one device", measured, not beyond, f"{tolerance:g}")

    def _add(self, claim: str, expected: str, measured: str, holds: bool, tolerance: str = "") -> None:
        more = {"tolerance": tolerance, "command": self.command}
        self.findings.append(fact(claim, expected, measured, holds, **more))

    def _open(self, claim: str, why: str, would_test: str) -> None:
        self.findings.append(not_tested(claim, why, would_test))


def _has(rank: RankGaps, module: str) -> bool:
    """Whether a rank has a part of a module."""
    return any(name.startswith(f"{module}.") for name in rank.boxes)


def _loss_gap(ranks: Iterable[RankGaps], reference: Reference, step: int) -> float:
    """The loss of a step over all ranks that count: their sums over their counts, as they reported them."""
    shares = [rank.steps[step] for rank in ranks if rank.counts]
    loss = sum(share.loss_sum for share in shares) / max(sum(share.valid for share in shares), 1)
    return relative_gap(loss, reference.steps[step].loss, 0.0)


def _parameter_places(ranks: Sequence[RankGaps]) -> list[Place]:
    return [
        (gap, len(rank.steps) - 1, number, name)
        for number, rank in enumerate(ranks)
        for name, gap in rank.parameters.items()
    ]
