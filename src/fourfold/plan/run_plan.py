"""What a run is expected to be, before any process starts: the plan `train` takes and `--dry-run` prints.

Every figure is computed from the settled Spec; what is not computed is listed in `not_predicted`, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Literal

from pydantic import ConfigDict, Field

from fourfold.plan.notes import cut_unproved, notes_on, unknown_cut
from fourfold.plan.parameters import CORRECTION, parameter_terms
from fourfold.plan.rehearsal import Rehearsal, sent_bytes
from fourfold.plan.state_bytes import INSTANTS, MOMENTS, Category, Instant, element_bytes, rank_bytes
from fourfold.spec.grid import Grid
from fourfold.spec.load import LoadedSpec
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec, PrecisionSpec
from fourfold.spec.value import Value
from fourfold.spec.words import counted

_OTHERS = "what torch, its allocator and the loader take for themselves"
_TIME = "time of a step"
_OF_KIND = {"import": "an imported model", "huggingface": "a model of transformers"}


class StateBytes(Value):
    """Bytes of one whole copy of the training state; with zero = 0 every data-parallel rank holds one."""

    parameters: int
    gradients: int
    moments: int
    total: int


class RunPlan(Value):
    """A run, predicted. None means not predicted; `not_predicted` says what and why."""

    model_config = ConfigDict(serialize_by_alias=True)

    schema_version: Literal["fourfold.plan/1"] = Field(default="fourfold.plan/1", alias="schema")
    spec: Spec  # settled
    provenance: dict[str, str]  # where each non-default came from, by dotted key
    world: int  # ranks in all
    nproc: int  # ranks on this machine
    command: tuple[str, ...]  # what was typed
    resume_from: str | None = None  # the checkpoint to go on from; None: from the first step
    steps: int  # optimizer steps
    samples_per_step: int  # over all ranks, microbatches and accumulation
    tokens_per_step: int | None  # places in those samples, padding included; None for vectors
    parameters: int | None
    parameter_terms: dict[str, int]  # parameters by term; empty if unknown
    state_bytes: StateBytes | None
    rank_bytes: Mapping[Instant, Mapping[Category, int]] | None = None  # of rank 0, which holds the most
    gradient_bytes_per_step: int | None  # sent by each rank in one step's all-reduce of gradients
    not_predicted: tuple[str, ...]
    notes: tuple[str, ...]
    rehearsal: Rehearsal | None = None  # one step, as it was rehearsed; only where that was asked for

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def make_run_plan(
    loaded: LoadedSpec, world: int, command: Sequence[str], nproc: int | None = None
) -> RunPlan:
    """Predict the run of `loaded` on `world` ranks, `nproc` of them (default: all) on this machine.

    Raises SpecError where layout or batch cannot be settled for `world`.
    """
    spec = settle(loaded.spec, world, loaded.provenance)
    batch = spec.batch.global_batch
    assert batch is not None, "a settled Spec has a global_batch"
    nproc = world if nproc is None else nproc
    terms = parameter_terms(spec.model)
    state = None if terms is None else state_bytes(terms, spec.precision)
    sent = None
    if state is not None and not _cut_by(spec.layout):
        payload = state.gradients // (2 if spec.precision.reduce == "bf16" else 1)
        sent = sent_bytes("all-reduce", payload, Grid.of(spec.layout).degree("dp"))
    sequence: int | None = getattr(spec.data, "sequence", None)
    return RunPlan(
        spec=spec,
        provenance=dict(loaded.provenance),
        world=world,
        nproc=nproc,
        command=tuple(command),
        steps=spec.run.steps,
        samples_per_step=batch,
        tokens_per_step=None if sequence is None else batch * sequence,
        parameters=None if terms is None else sum(terms.values()),
        parameter_terms=terms or {},
        state_bytes=state,
        rank_bytes=rank_bytes(spec, 0),
        gradient_bytes_per_step=sent,
        not_predicted=_not_predicted(spec),
        notes=(*loaded.notes, *notes_on(spec, nproc)),
    )


def with_rehearsal(plan: RunPlan, rehearsal: Rehearsal) -> RunPlan:
    """The plan with what its step was seen to hold and to send: of a model that was unknown, its sizes too."""
    return plan.model_copy(
        update={
            "rehearsal": rehearsal,
            "parameters": rehearsal.parameters,
            "rank_bytes": rehearsal.state,
            "not_predicted": (_OTHERS, "workspaces inside kernels", _TIME),
            "notes": _once_built(plan),
        }
    )


def without_step(plan: RunPlan, parameters: int, held: Mapping[Category, int], note: str) -> RunPlan:
    """The plan of a model that was built, and whose step could not be rehearsed. held: by rank 0 after init."""
    known = {"parameters": parameters, "rank_bytes": plan.rank_bytes or {"after init": held}}
    return plan.model_copy(update=known | {"notes": (*_once_built(plan), note)})


def _once_built(plan: RunPlan) -> tuple[str, ...]:
    """The notes, with what is known of the cut of a user's model now that it was built."""
    unsure = dict.fromkeys(unknown_cut(plan.spec), cut_unproved(plan.spec))
    return tuple(unsure.get(note, note) for note in plan.notes)


def state_bytes(terms: Mapping[str, int], precision: PrecisionSpec) -> StateBytes:
    """Bytes of parameters, gradients and AdamW's two moments: 16 per fp32 parameter that a gradient moves.

    terms: parameters by term, as `parameter_terms` gives them. Source: Rajbhandari et al., arXiv 1910.02054,
    section 3.1 (there in mixed precision; here all four are of one dtype).
    """
    count = sum(terms.values())
    trained = count - terms.get(CORRECTION, 0)
    each = element_bytes(precision)
    moments = MOMENTS * each * trained
    return StateBytes(
        parameters=each * count,
        gradients=each * trained,
        moments=moments,
        total=each * (count + trained) + moments,
    )


def _cut_by(layout: LayoutSpec) -> list[str]:
    """The settings of a settled layout that cut the model or its state, so that no rank holds a whole copy."""
    cutting = [axis for axis in ("pp", "cp", "tp", "ep", "dp_shard") if getattr(layout, axis) != 1]
    return [*cutting, "zero"] if layout.zero else cutting


def _not_predicted(spec: Spec) -> tuple[str, ...]:
    missing = [
        "activations kept from forward to backward",
        "logits and the loss's workspace",
        "gathered units, gradient buckets and other buffers inside a step",
        _OTHERS,
        _TIME,
    ]
    if spec.model.kind in ("import", "huggingface"):
        missing.append(
            f"parameters, state and traffic of {_OF_KIND[spec.model.kind]}: known once it is built"
        )
    elif cut := _cut_by(spec.layout):
        named = ", ".join(f"layout.{axis}" for axis in cut)
        known = rank_bytes(spec, 0) is not None
        missing.append(f"traffic under {named}" if known else f"each rank's part, and traffic, under {named}")
    if spec.precision.compute in ("bf16", "fp16"):
        missing.append(f"{spec.precision.compute} copies of weights that autocast makes")
    return tuple(missing)


def _lines(plan: RunPlan) -> list[str]:
    """The plan as text, at most 80 columns wide."""
    batch, grid = plan.spec.batch, Grid.of(plan.spec.layout)
    step = f"{counted(plan.samples_per_step, 'sample', ',')} = micro {batch.micro_batch}"
    step += f" × accumulation {batch.accumulation} × data parallel {grid.degree('dp')}"
    if plan.tokens_per_step is not None:
        step += f"; {counted(plan.tokens_per_step, 'token', ',')}"
    rows = [
        (
            "run",
            f"{plan.spec.name}: {counted(plan.steps, 'step', ',')} on {counted(plan.world, 'rank')}, "
            f"{plan.nproc} on this machine",
        ),
        ("step", step),
        ("model", "unknown" if plan.parameters is None else f"{plan.parameters:,} parameters"),
    ]
    if plan.state_bytes is not None:
        state = plan.state_bytes
        parts = ("parameters", "gradients", "moments")
        text = ", ".join(f"{part} {_size(getattr(state, part))}" for part in parts)
        held = "a whole copy" if _cut_by(plan.spec.layout) else "on every rank"
        rows.append(("state", f"{_size(state.total)} {held}: {text}"))
    if plan.rank_bytes is not None:
        rows.append(("a rank", "; ".join(_held(plan.rank_bytes))))
    if plan.rehearsal is not None:
        rows += _seen(plan.rehearsal)
    elif plan.gradient_bytes_per_step is not None:
        sent = _size(plan.gradient_bytes_per_step)
        rows.append(("traffic", f"{sent} sent by each rank per step: all-reduce of gradients"))
    rows.append(("validate", _when_validated(plan.spec)))
    rows.append(("no figure", "; ".join(plan.not_predicted)))
    rows += [("note", note) for note in plan.notes]
    return [
        line
        for name, text in rows
        for line in wrap(text, 80, initial_indent=f"{name:<11}", subsequent_indent=" " * 11)
    ]


def _held(by_instant: Mapping[Instant, Mapping[Category, int]]) -> list[str]:
    """What the fullest rank holds, in memory and on disk."""
    told = [
        f"{_size(sum(held.values()) - held['on disk'])} {instant}"
        for instant in INSTANTS
        if (held := by_instant.get(instant)) is not None
    ]
    disk = by_instant["after init"]["on disk"]
    return [*told, f"{_size(disk)} on disk"] if disk else told


def _seen(rehearsal: Rehearsal) -> list[tuple[str, str]]:
    """A rehearsed step: the most it holds, of what, and what it sends."""
    parts = [
        f"{name} {_size(count)}"
        for name, count in rehearsal.peak_state.items()
        if count and name != "on disk"
    ]
    most = (
        f"at most {_size(rehearsal.peak_bytes)}, in {rehearsal.peak_phase}: {', '.join(parts)}, beside them "
    )
    most += f"{_size(rehearsal.peak_beside_bytes)} (a microbatch keeps {_size(rehearsal.activations_bytes)})"
    sent = [
        f"{_size(each.sent_bytes)} sent in {counted(each.count, each.kind)} over {each.over}, {each.ranks} ranks"
        for each in rehearsal.traffic
    ]
    return [("rehearsed", most), ("traffic", "; ".join(sent) or "none")]


def _when_validated(spec: Spec) -> str:
    if not (spec.data.validation_fraction or getattr(spec.data, "validation_path", None)):
        return "never: no data are kept for it"
    every = spec.run.validate_every
    when = f"every {every:,} steps and at the end" if every else "only at the end (run.validate_every = 0)"
    return f"{when}, {spec.run.validation_batches or 'all'} global batches"


def _size(count: int) -> str:
    """Bytes, for people: GiB from 1 GiB up, MiB from a hundredth of one up."""
    if count < 2**20 / 100:
        return f"{count:,} B"
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"
