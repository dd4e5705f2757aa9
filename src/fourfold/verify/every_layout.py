"""Every legal layout of a world against one device: one reference for all of them, one warm pool for each mesh shape.

The model is made small and adversarial, the batch such that every layout cuts it into two microbatches or more; what
was changed is said. A rank never gets process groups of another shape: fresh ranks are forked in between.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from fourfold.record.finding import document, fact, not_tested, verdict_of, write_findings
from fourfold.spec.data import SyntheticDataSpec
from fourfold.spec.errors import FourfoldError, Problem, RankFailed, SpecError
from fourfold.spec.grid import AXES, Grid
from fourfold.spec.keys import toml_word
from fourfold.spec.layouts import Layouts, Refused, layouts
from fourfold.spec.model import DecoderSpec
from fourfold.spec.rules import require
from fourfold.spec.schedules import stages_each
from fourfold.spec.settle import data_parallel_degree, settle
from fourfold.spec.spec import Spec
from fourfold.spec.training import BatchSpec, LayoutSpec
from fourfold.verify.case import TIMEOUT_S, Case, Ranks, clipping, search, traced_reference
from fourfold.verify.deviation import Deviation
from fourfold.verify.equal import SCHEMA, layout_entry, prepared, require_steps
from fourfold.verify.judge import Judge
from fourfold.verify.measure import GATE_EPS, GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, worst
from fourfold.verify.out import open_folder
from fourfold.verify.reference import Reference
from fourfold.verify.uneven import sharpened

LAYERS, SEQUENCE = 4, 32  # of a decoder, at most
MICROBATCHES = 2
ROWS = 2  # of a microbatch where the batch is cut into most shares

Say = Callable[[str], None]
_PLAIN = LayoutSpec()  # what need not be told


@dataclass(frozen=True, slots=True)
class Judged:
    """One layout: what was found, and where it first deviates if it does.

    seconds: fresh ranks included. refused: what its ranks refused, of the request or of this layout.
    """

    spec: Spec
    judge: Judge
    seconds: float
    deviation: Deviation | None
    command: str
    refused: FourfoldError | None = None

    @property
    def gap(self) -> str:
        """The worst gap in words; where ranks did not come to their end, nothing was compared."""
        return f"worst {self.judge.worst_gate:.2g}" if self.judge.tensors else "not compared"

    @property
    def words(self) -> str:
        return words(self.spec.layout)

    @property
    def passed(self) -> bool:
        return verdict_of(self.judge.findings) == "pass"


def verify_every_layout(
    spec: Spec,
    world: int,
    *,
    steps: int = 3,
    only: Sequence[LayoutSpec] | None = None,
    out: Path | None = None,
    setup: str | None = None,
    timeout_s: float = TIMEOUT_S,
    command: str = "",
    repeat: Callable[[Sequence[str]], str] = lambda _: "",
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Compare every layout that is legal on `world` ranks with one device over `steps` optimizer steps.

    spec: not settled; its own degrees, zero and sp are not looked at. only: some of the legal layouts, in place of
    all. repeat: the command that judges one layout alone, from its settings. Others as in `equal.verify_equal`.
    Returns the document fourfold.verify.equal/1 with one finding and one entry for each layout.
    Raises SpecError or DataError for a request or data that cannot be trained on, in the ranks of every layout too, or
    without a legal layout.
    """
    require_steps(steps)
    small, changes = reduced(spec, world)
    found = layouts(small, world)
    asked = list(found.legal if only is None else only)
    if not asked:
        raise SpecError([_none_legal(world), *(refused.problem for refused in found.refused)])
    case, adverse, changes = _case(small, world, steps, changes)
    shared = Judge(command, list(changes))
    say(
        f"one device: {steps} steps of {case.spec.batch.global_batch} samples in fp64, for {len(asked)} layouts"
    )
    with (
        open_folder(out, spec.name) as folder,
        tempfile.TemporaryDirectory(prefix="fourfold-reference-") as scratch,
    ):
        case, reference = clipping(case.at(Path(scratch)).with_optimizer(eps=GATE_EPS), shared)
        run = _Run(case, reference, setup, timeout_s, shared, adverse, repeat)
        judged = list(_told(run.all(asked), len(asked), say))
        if judged[0].refused is not None and all(one.refused for one in judged):
            raise judged[0].refused
    shared.sometimes(case.spec, reference)
    shared.sharpness(case.spec, spec)
    return _document(folder, spec, world, steps, adverse, shared, judged, found)


def reduced(spec: Spec, world: int) -> tuple[Spec, tuple[str, ...]]:
    """The Spec, small, with a batch that every data-parallel degree cuts into whole microbatches; and what changed."""
    rows = MICROBATCHES * ROWS * world
    changes = [
        f"the layout: every legal one of {world} ranks",
        f"batch: {rows} samples, so that every data-parallel degree has {MICROBATCHES} microbatches (× pp)",
    ]
    update: dict[str, Any] = {"batch": BatchSpec(global_batch=rows, accumulation=MICROBATCHES)}
    model, data = spec.model, spec.data
    if isinstance(model, DecoderSpec) and model.layers > LAYERS:
        changes.append(f"model.layers {model.layers} -> {LAYERS}")
        update["model"] = model.model_copy(update={"layers": LAYERS})
    if not isinstance(data, SyntheticDataSpec) and data.sequence > SEQUENCE:
        changes.append(f"data.sequence {data.sequence} -> {SEQUENCE}")
        update["data"] = data.model_copy(update={"sequence": SEQUENCE})
    return spec.model_copy(update=update), tuple(changes)


def words(layout: LayoutSpec) -> str:
    """A settled layout in a few words, such as "dp_shard 4 × tp 2, zero 3, sp"."""
    grid = Grid.of(layout)
    used = [f"{axis} {grid.degree(axis)}" for axis in AXES if grid.degree(axis) > 1] or ["one rank"]
    parts = [" × ".join(used)] + [f"ep {layout.ep}"] * (layout.ep > 1)
    parts += [f"zero {layout.zero}"] * (layout.zero > 0) + ["sp"] * layout.sp
    parts += [layout.cp_method] * (layout.cp > 1 and layout.cp_method != _PLAIN.cp_method)
    parts += [layout.pp_schedule] * (layout.pp > 1 and layout.pp_schedule != _PLAIN.pp_schedule)
    parts += [f"{stages_each(layout)} stages a rank"] * (layout.pp > 1 and layout.pp_virtual is not None)
    parts += [f"split {'+'.join(map(str, layout.pp_split or ()))}"] * (
        layout.pp > 1 and layout.pp_split is not None
    )
    return ", ".join(parts + [f"recompute {layout.recompute}"] * (layout.recompute != "none"))


def settings(spec: Spec) -> tuple[str, ...]:
    """What `--set` makes a Spec judge this layout alone, on the same model and batch."""
    layout, batch, model = spec.layout, spec.batch, spec.model
    values = {f"layout.{axis}": getattr(layout, axis) for axis in (*AXES, "ep", "zero")}
    values = {key: value for key, value in values.items() if value != 1 or key == "layout.dp_replicate"}
    values |= {"layout.sp": str(layout.sp).lower(), "batch.global_batch": batch.global_batch}
    values |= {"batch.micro_batch": batch.micro_batch, "batch.accumulation": batch.accumulation}
    options = ("recompute", "recompute_keep", "cp_method", "pp_schedule", "pp_virtual", "pp_split")
    for option in options:
        if (value := getattr(layout, option)) != getattr(_PLAIN, option):
            values[f"layout.{option}"] = toml_word(value)
    decoder = getattr(model, "args", {}).get("decoder", {})
    if "layers" in decoder:
        values["model.layers"] = decoder["layers"]
    if not isinstance(spec.data, SyntheticDataSpec):
        values["data.sequence"] = spec.data.sequence
    return tuple(f"{key}={value}" for key, value in values.items())


@dataclass(slots=True)
class _Run:
    """All layouts of one request. case: their Spec but for layout and microbatches."""

    case: Case
    reference: Reference
    setup: str | None
    timeout_s: float
    shared: Judge
    adverse: bool
    repeat: Callable[[Sequence[str]], str]
    _traced: tuple[Reference, Path] | None = None

    def all(self, asked: Sequence[LayoutSpec]) -> Iterator[Judged]:
        """Layouts by mesh shape, each shape with ranks of its own."""
        cases = sorted((self._of(layout) for layout in asked), key=lambda c: repr(Grid.of(c.spec.layout)))
        for _, of_shape in groupby(cases, key=lambda case: Grid.of(case.spec.layout)):
            since = time.perf_counter()
            device = self.case.spec.hardware.device
            ranks = Ranks(self.case.world, self.setup, self.timeout_s, device)
            try:
                for case in of_shape:
                    yield self._judged(case, ranks, since)
                    since = time.perf_counter()
            finally:
                ranks.close()

    def _of(self, layout: LayoutSpec) -> Case:
        spec = self.case.spec
        unused = layout.unused_parameters or self.adverse
        layout = layout.model_copy(update={"unused_parameters": unused})
        whole = spec.batch.global_batch
        assert whole, "the Spec is settled"
        # In a pipeline as many as fill every schedule; `reduced` has rows for them.
        microbatches = MICROBATCHES * layout.pp
        micro = whole // (microbatches * data_parallel_degree(layout))
        batch = BatchSpec(global_batch=whole, micro_batch=micro, accumulation=microbatches)
        return replace(self.case, spec=spec.model_copy(update={"layout": layout, "batch": batch}))

    def _judged(self, case: Case, ranks: Ranks, since: float) -> Judged:
        command = self.repeat(settings(case.spec))
        judge, deviation, refused = Judge(command, []), None, None
        try:
            judge.gate(ranks.measure(case, self.reference), self.reference)
        except RankFailed as failure:
            judge.rank_failed(failure)
            refused = failure.refusal()
        if judge.failed and refused is None:
            deviation = self._search(case, ranks, judge)
        return Judged(case.spec, judge, time.perf_counter() - since, deviation, command, refused)

    def _search(self, case: Case, ranks: Ranks, judge: Judge) -> Deviation | None:
        if self._traced is None:
            self._traced = traced_reference(self.case, self.case.steps, "traced")
        name = words(case.spec.layout).replace(" ", "-")
        found = search(case, ranks, case.steps, PARAMETER_TOLERANCE, name, self._traced)
        judge.first_deviation(found)
        return found


def _case(
    small: Spec, world: int, steps: int, changes: tuple[str, ...]
) -> tuple[Case, bool, tuple[str, ...]]:
    """The Spec on as many data-parallel ranks as there are, made sharp, and adversarial if it is a decoder."""
    settled = settle(small.model_copy(update={"layout": LayoutSpec()}), world)
    require(settled, "train")
    sharp, more = sharpened(settled)
    adverse = isinstance(small.model, DecoderSpec)
    case, changes = prepared(sharp, world, steps, adverse, (*changes, *more))
    return case, adverse, changes


def _told(judged: Iterator[Judged], count: int, say: Say) -> Iterator[Judged]:
    """One line for each, as it comes."""
    for number, one in enumerate(judged, 1):
        verdict = "pass" if one.passed else "FAIL"
        line = f"[{number}/{count}] {one.words}: {verdict}, {one.gap}, {one.seconds:.1f} s"
        say(line if one.deviation is None else f"{line}; {one.deviation}")
        yield one


def _document(
    folder: Any,
    spec: Spec,
    world: int,
    steps: int,
    adverse: bool,
    shared: Judge,
    judged: Sequence[Judged],
    found: Layouts,
) -> dict[str, Any]:
    findings = [_finding(one) for one in judged] + [
        *shared.findings,
        *_unequal(judged),
        *_open(spec, adverse),
    ]
    facts: dict[str, Any] = {
        "spec": spec.name,
        "world": world,
        "steps": steps,
        "adversarial": adverse,
        "count": len(judged),
        "worst_relative": worst(one.judge.worst_gate for one in judged),
        "seconds_per_layout": sum(one.seconds for one in judged) / len(judged),
        "changes": shared.changes,
        "first_deviation": next((asdict(one.deviation) for one in judged if one.deviation), None),
        "layouts": [_entry(one, world) for one in judged],
        "refused": [_refused(refused) for refused in found.refused],
    }
    path = write_findings(folder, "equal-layouts", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, findings_file=str(path))


def _finding(one: Judged) -> Any:
    """A layout in one line: its worst gap; or what failed, and where it first deviates."""
    failed = [f"{f.claim}: {f.measured}" for f in one.judge.findings if f.verdict == "fail"]
    measured = one.gap
    if failed:
        measured = str(one.deviation) if one.deviation is not None else "; ".join(failed[:2])
    more = {"tolerance": f"{GRADIENT_TOLERANCE:g}", "command": one.command}
    return fact(one.words, "equal to one device", measured, not failed, **more)


def _entry(one: Judged, world: int) -> dict[str, Any]:
    return {
        **layout_entry(one.spec, world, one.judge),
        "words": one.words,
        "seconds": round(one.seconds, 3),
        "command": one.command,
        "first_deviation": asdict(one.deviation) if one.deviation is not None else None,
        "failed": [f.model_dump(mode="json") for f in one.judge.findings if f.verdict == "fail"],
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


def _none_legal(world: int) -> Problem:
    return Problem(
        asked=f"every legal layout of {world} ranks",
        found="none",
        why="each is refused by one of the rules below",
        instead="another --world",
    )
