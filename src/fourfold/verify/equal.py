"""Equality: does this layout compute what one device computes?

Real ranks run the trainer's own step, in fp64 on the CPU, and compare every loss, gradient, norm and parameter with
a reference that shares nothing of that step (`reference.py`). Where something differs, both run again with every
module traced, and the first deviating value in execution order is named (`deviation.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fourfold.data.source import open_sources
from fourfold.record.finding import document, verdict_of, write_findings
from fourfold.spec.errors import Problem, RankFailed, SpecError
from fourfold.spec.rules import require
from fourfold.spec.settle import data_parallel_degree, settle
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted
from fourfold.train.setup import batch_schedule
from fourfold.verify.adversarial import adversarial, chosen
from fourfold.verify.case import TIMEOUT_S, Case, Ranks, clipping, search
from fourfold.verify.deviation import Deviation
from fourfold.verify.judge import Judge
from fourfold.verify.measure import GATE_EPS, PARAMETER_TOLERANCE, PARAMETER_TOLERANCE_OWN_EPS
from fourfold.verify.out import open_folder
from fourfold.verify.uneven import Masking, choose_salt, sharpened

SCHEMA = "fourfold.verify.equal/1"


def verify_equal(
    spec: Spec,
    world: int,
    *,
    steps: int = 5,
    adverse: bool = False,
    out: Path | None = None,
    setup: str | None = None,
    timeout_s: float = TIMEOUT_S,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compare `world` ranks with one device over `steps` optimizer steps of the Spec's own data.

    spec: settled or not. adverse: its decoder and data made adversarial. out: folder for the findings (default: the
    next free runs/verify-<name>-<n>). setup: "module:function" called in every rank first (tests plant faults with
    it). command: to repeat it. say: takes each line of the story.
    Returns the document fourfold.verify.equal/1; a rank that fails is a failed finding.
    Raises SpecError or DataError for a request or data that cannot be trained on, in a rank too.
    """
    require_steps(steps)
    settled = settle(spec, world)
    require(settled, "train")
    asked, changes = sharpened(settled)
    case, changes = prepared(asked, world, steps, adverse, changes)
    judge = Judge(command, list(changes))
    with (
        open_folder(out, asked.name) as folder,
        closing(Ranks(world, setup, timeout_s, case.spec.hardware.device)) as ranks,
        tempfile.TemporaryDirectory(prefix="fourfold-reference-") as scratch,
    ):
        say(f"one device: {counted(steps, 'step')} of {case.spec.batch.global_batch} samples in fp64")
        case, deviation = _compare(case.at(Path(scratch)), ranks, judge, say)
    judge.sharpness(case.spec, settled)
    facts: dict[str, Any] = {
        "spec": asked.name,
        "world": world,
        "steps": steps,
        "adversarial": adverse,
        "worst_relative": judge.worst_gate,
        "worst_relative_own_eps": judge.worst_own_eps,
        "changes": judge.changes,
        "first_deviation": asdict(deviation) if deviation is not None else None,
        "layouts": [layout_entry(case.spec, world, judge)],
        "tensors": dict(sorted(judge.tensors.items())),
    }
    path = write_findings(folder, "equal", judge.findings, SCHEMA, **facts)
    return document(SCHEMA, judge.findings, **facts, findings_file=str(path))


def require_steps(steps: int) -> None:
    """Raise SpecError where there is nothing to compare."""
    if steps < 1:
        raise SpecError(
            Problem(f"--steps {steps}", "no step at all", "nothing would be compared", "--steps 5")
        )


def prepared(
    spec: Spec, world: int, steps: int, adverse: bool, changes: tuple[str, ...]
) -> tuple[Case, tuple[str, ...]]:
    """The case of a settled and sharpened Spec, without a place to write in; and what was changed in all."""
    if adverse:
        spec, more = adversarial(spec)
        changes += more
    source = open_sources(spec).train
    schedule = batch_schedule(spec, len(source), data_parallel_degree(spec.layout))
    unsalted = Masking(0, adverse).torn_only(source)
    masking = Masking(choose_salt(unsalted, schedule, steps), adverse)
    made = masking.over(source)
    if adverse:
        spec, told = chosen(spec, made, schedule, steps)
        changes += (told,)
    return Case(spec, world, steps, made, masking, Path()), changes


def _compare(
    case: Case, ranks: Ranks, judge: Judge, say: Callable[[str], None]
) -> tuple[Case, Deviation | None]:
    """Both runs of the gate, and where one fails the search for the first deviation."""
    own_eps = case.spec.optimizer.eps
    case, reference = clipping(case.with_optimizer(eps=GATE_EPS), judge)
    judge.sometimes(case.spec, reference)
    try:
        say("the ranks: the same steps, every value compared")
        judge.gate(ranks.measure(case, reference), reference)
        if own_eps != GATE_EPS and not judge.failed:
            say(f"both again, with AdamW's eps at {own_eps:g}")
            own = case.with_optimizer(eps=own_eps)
            reference = own.reference("own-eps")
            judge.own_eps(ranks.measure(own, reference), own_eps)
            if judge.failed:
                return case, _search(own, ranks, judge, case.steps, PARAMETER_TOLERANCE_OWN_EPS)
    except RankFailed as failure:
        if (refused := failure.refusal()) is not None:
            raise refused from failure
        judge.rank_failed(failure)
    if not judge.failed:
        return case, None
    say("it does not hold: both again, traced, to find the first deviation")
    return case, _search(case, ranks, judge, judge.first_failed_step or case.steps, PARAMETER_TOLERANCE)


def _search(case: Case, ranks: Ranks, judge: Judge, steps: int, tolerance: float) -> Deviation | None:
    found = search(case, ranks, steps, tolerance)
    judge.first_deviation(found)
    return found


def layout_entry(spec: Spec, world: int, judge: Judge) -> dict[str, Any]:
    """What a document says of one layout."""
    return {
        "world": world,
        **spec.layout.model_dump(mode="json"),
        **spec.batch.model_dump(mode="json"),
        "worst_relative": judge.worst_gate,
        "worst_relative_own_eps": judge.worst_own_eps,
        "verdict": verdict_of(judge.findings),
    }
