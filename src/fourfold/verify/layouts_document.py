"""What is told of many layouts: one finding and one entry for each, and what was left untried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fourfold.record.finding import document, fact, not_tested, verdict_of, write_findings
from fourfold.spec.errors import FourfoldError, Problem, SpecError
from fourfold.spec.layouts import Layouts, Refused
from fourfold.spec.model import DecoderSpec
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted
from fourfold.verify.covering import MICROBATCHES, Chosen
from fourfold.verify.deviation import Deviation
from fourfold.verify.equal import SCHEMA, layout_entry
from fourfold.verify.judge import Judge
from fourfold.verify.layout_words import words
from fourfold.verify.measure import GATE_EPS, GRADIENT_TOLERANCE, worst
from fourfold.verify.oracles import Oracles


@dataclass(frozen=True, slots=True)
class Judged:
    """One layout: what was found, and where it first deviates if it does.

    seconds: fresh ranks included. refused: what its ranks refused, of the request or of this layout. own: the model is
    the user's, or a library's: what it can be cut by shows when it is built.
    """

    spec: Spec
    cut: int
    judge: Judge
    seconds: float
    deviation: Deviation | None
    command: str
    refused: FourfoldError | None = None
    own: bool = False

    @property
    def cannot(self) -> Problem | None:
        """Why this model has no such layout; then nothing failed, and nothing was judged."""
        if not self.own or not isinstance(self.refused, SpecError):
            return None
        return self.refused.problems[0]

    @property
    def gap(self) -> str:
        """The worst gap in words; where ranks did not come to their end, nothing was compared."""
        return f"worst {self.judge.worst_gate:.2g}" if self.judge.tensors else "not compared"

    @property
    def words(self) -> str:
        """The layout; its microbatches too, where they are not as many as usual."""
        cut = f", {counted(self.spec.batch.accumulation or 1, 'microbatch')}" * (self.cut != MICROBATCHES)
        return words(self.spec.layout) + cut

    @property
    def verdict(self) -> str:
        return "refused" if self.cannot else verdict_of(self.judge.findings)


def layouts_document(
    folder: Any,
    spec: Spec,
    oracles: Oracles,
    judged: Sequence[Judged],
    chosen: Chosen | None,
    found: Layouts,
) -> dict[str, Any]:
    """The document fourfold.verify.equal/1 of many layouts, written in `folder` too.

    chosen: how they were chosen; None where they were given. found: the layouts that are legal, and what is refused.
    """
    shared = oracles.shared
    findings = [_finding(one) for one in judged] + [
        *shared.findings,
        *_unequal(judged),
        *_open(spec, oracles.adverse),
        *_left(judged, chosen, found),
    ]
    how = {} if chosen is None else {"products": len(chosen.products), "pairs": chosen.pairs}
    facts: dict[str, Any] = {
        "spec": spec.name,
        "world": oracles.world,
        "steps": oracles.steps,
        "adversarial": oracles.adverse,
        **how,
        "count": sum(one.cannot is None for one in judged),
        "worst_relative": worst(one.judge.worst_gate for one in judged if one.cannot is None),
        "seconds_per_layout": sum(one.seconds for one in judged) / len(judged),
        "changes": shared.changes,
        "first_deviation": next((asdict(one.deviation) for one in judged if one.deviation), None),
        "layouts": [_entry(one, oracles.world) for one in judged],
        "refused": [_refused(refused) for refused in found.refused],
    }
    path = write_findings(folder, "equal-layouts", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, findings_file=str(path))


def _finding(one: Judged) -> Any:
    """A layout in one line: its worst gap; or what failed, and where it first deviates; or why the model has none."""
    if one.cannot is not None:
        return not_tested(one.words, f"{one.cannot.found}: {one.cannot.why}", one.cannot.instead)
    failed = [f"{f.claim}: {f.measured}" for f in one.judge.findings if f.verdict == "fail"]
    measured = one.gap
    if failed:
        measured = str(one.deviation) if one.deviation is not None else "; ".join(failed[:2])
    more = {"tolerance": f"{GRADIENT_TOLERANCE:g}", "command": one.command}
    return fact(one.words, "equal to one device", measured, not failed, **more)


def _entry(one: Judged, world: int) -> dict[str, Any]:
    return {
        **layout_entry(one.spec, world, one.judge),
        "verdict": one.verdict,
        "words": one.words,
        "seconds": round(one.seconds, 3),
        "command": one.command,
        "first_deviation": asdict(one.deviation) if one.deviation is not None else None,
        "failed": []
        if one.cannot
        else [f.model_dump(mode="json") for f in one.judge.findings if f.verdict == "fail"],
    }


def _unequal(judged: Sequence[Judged]) -> Iterator[Any]:
    """In how many layouts ranks have unequally many valid targets."""
    several = [one.judge.valid for one in judged if any(len(step) > 1 for step in one.judge.valid)]
    if several:
        unequal = sum(any(len(set(step)) > 1 for step in valid) for valid in several)
        yield fact(
            "the check is sharp: ranks have unequally many valid targets",
            "in one step or more of each layout with several shares of the batch",
            f"in {unequal} of {len(several)} layouts",
            unequal == len(several),
        )


def _refused(refused: Refused) -> dict[str, Any]:
    told = {"family": refused.family, "rule": refused.rule, "count": refused.count}
    return told | {"why": refused.problem.why, "instead": refused.problem.instead}


def _open(spec: Spec, adverse: bool) -> Iterator[Any]:
    yield not_tested(
        "parameters at the Spec's own eps",
        f"every layout was judged at the gate's eps {GATE_EPS:g} alone",
        "the command of one layout",
    )
    if adverse and isinstance(spec.model, DecoderSpec) and not spec.model.tied:
        yield not_tested(
            "a head of its own",
            "the adversarial model's head is tied to its embedding; the Spec's is not",
            "verify equal of one layout without --all and --adversarial",
        )
    if not adverse:
        yield not_tested(
            "the adversarial model",
            f'model.kind = "{spec.model.kind}" is judged as it is',
            'a Spec with model.kind = "decoder"',
        )


def _left(judged: Sequence[Judged], chosen: Chosen | None, found: Layouts) -> Iterator[Any]:
    """What of all that is legal was not judged."""
    names = {one.words for one in judged}
    left = sum(words(layout) not in names for layout in found.legal)
    if chosen is not None and left:
        yield not_tested(
            "each legal layout",
            f"{counted(left, 'layout')} of {len(found.legal)} that differ from judged ones only in zero or sp were "
            f"not: each of their settings was judged beside each other setting, {chosen.pairs:,} pairs in all",
            "the same command without --all, for each",
        )
