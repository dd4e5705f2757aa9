"""What a plan says beside its figures: nothing that forbids the run, all that its user may not expect."""

from __future__ import annotations

from collections.abc import Iterator

from fourfold.plan.pipeline_schedules import bubble_by_formula
from fourfold.record.environment import cores
from fourfold.spec.boxes import shard_range
from fourfold.spec.model import DecoderSpec, ImportSpec, MlpSpec
from fourfold.spec.rules_model import moe_of
from fourfold.spec.schedules import stages_each
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec
from fourfold.spec.words import counted


def notes_on(spec: Spec, nproc: int) -> tuple[str, ...]:
    """Notes on the settled `spec` with `nproc` ranks on this machine."""
    return (
        *_short_of_warm_up(spec),
        *_nothing_to_shard(spec),
        *_nothing_to_move(spec),
        *_nothing_to_cut(spec),
        *_bubble(spec),
        *_nothing_to_recompute(spec),
        *_compiled(spec),
        *_uneven(spec),
        *unknown_cut(spec),
        *_routed(spec),
        *_crowded(spec, nproc),
    )


def _short_of_warm_up(spec: Spec) -> Iterator[str]:
    warmup, steps = spec.optimizer.warmup_steps, spec.run.steps
    if warmup > steps:
        yield (
            f"run.steps = {steps} ends inside the warm-up of {counted(warmup, 'step')}: the learning rate stays below "
            "optimizer.lr"
        )


def _nothing_to_shard(spec: Spec) -> Iterator[str]:
    layout = spec.layout
    if layout.zero and layout.dp_shard == 1 and layout.cp == 1:
        yield f"layout.zero = {layout.zero} does nothing with dp_shard = 1: there is one rank to shard over"


def _nothing_to_move(spec: Spec) -> Iterator[str]:
    if spec.layout.offload == "cpu" and spec.hardware.device != "cuda":
        yield "layout.offload = cpu moves state off a CUDA device: a rank on the CPU holds it there already"


def _nothing_to_cut(spec: Spec) -> Iterator[str]:
    """Options of an axis of one rank."""
    layout, plain = spec.layout, LayoutSpec()
    options = {"pp": ("pp_schedule", "pp_virtual", "pp_split"), "cp": ("cp_method",)}
    for axis, names in options.items():
        idle = [f"layout.{name}" for name in names if getattr(layout, name) != getattr(plain, name)]
        if idle and getattr(layout, axis) == 1:
            do = "does" if len(idle) == 1 else "do"
            yield f"{' and '.join(idle)} {do} nothing with layout.{axis} = 1"


def _nothing_to_recompute(spec: Spec) -> Iterator[str]:
    if spec.layout.recompute != "none" and isinstance(spec.model, MlpSpec):
        yield (
            f"layout.recompute = {spec.layout.recompute} frees nothing of an mlp: each of its blocks is one Linear, "
            "which keeps no more than what goes into it"
        )


def _compiled(spec: Spec) -> Iterator[str]:
    if spec.layout.compile != "none":
        yield (
            "layout.compile: code of the blocks is made in the first step, and in the first validation; what is told "
            "of activations is of blocks as they are, and compiled ones may hold less"
        )


def _bubble(spec: Spec) -> Iterator[str]:
    """Too few microbatches for the stages: how long a rank waits, by the schedule's formula."""
    layout, microbatches = spec.layout, spec.batch.accumulation
    if layout.pp == 1 or microbatches is None or microbatches >= layout.pp:
        return
    share = bubble_by_formula(layout.pp_schedule, layout.pp, microbatches, stages_each(layout))
    waits = "" if share is None else f": a rank waits for {share:.0%} of a step"
    yield (
        f"batch.accumulation = {microbatches} is fewer microbatches than the {layout.pp} ranks of the pipeline{waits}; "
        "more of them, of fewer samples, fill it"
    )


def _uneven(spec: Spec) -> Iterator[str]:
    """Rows of a vocabulary or a sequence that do not divide: the first ranks hold more of them."""
    layout, model = spec.layout, spec.model
    if isinstance(model, DecoderSpec) and model.vocabulary % layout.tp:
        yield f"vocabulary {model.vocabulary} over tp {layout.tp}: {_parts(model.vocabulary, layout.tp)} rows"
    sequence: int | None = getattr(spec.data, "sequence", None)
    if sequence is not None and layout.sp and sequence % layout.tp:
        yield f"sequence {sequence} over tp {layout.tp}: {_parts(sequence, layout.tp)} tokens between its products"


def _parts(length: int, ranks: int) -> str:
    """ "17 and 16": the size of each rank's part, or where there are many how often each occurs."""
    sizes = [shard_range(length, ranks, rank)[1] for rank in range(ranks)]
    if ranks <= 4:
        texts = [str(size) for size in sizes]
    else:
        texts = [f"{sizes.count(size)} × {size}" for size in dict.fromkeys(sizes)]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def unknown_cut(spec: Spec) -> Iterator[str]:
    """What is not known of how a user's own model is cut, before it is built."""
    if isinstance(spec.model, ImportSpec) and spec.layout.tp > 1:
        asked = f"whether tp {spec.layout.tp} cuts this model"
        yield (
            f"{asked} is known once it is built: its sharding() says (docs/own_model.md); whether it cuts it right, "
            "only fourfold verify equal shows"
        )


def cut_unproved(spec: Spec) -> str:
    """What is still not known of it once it is built."""
    return f"tp {spec.layout.tp} cuts this model; whether it cuts it right, only fourfold verify equal shows"


def _routed(spec: Spec) -> Iterator[str]:
    """What is only known once tokens choose their experts; and what a small capacity drops in any case."""
    moe = moe_of(spec)
    if moe is None:
        return
    if spec.layout.ep > 1:
        yield (
            f"ep {spec.layout.ep}: traffic and memory of a rehearsal are those of experts chosen equally often; ranks "
            "whose experts are chosen more often hold and receive more"
        )
    if moe.capacity_factor is not None and moe.capacity_factor < 1:
        yield (
            f"model.moe.capacity_factor = {moe.capacity_factor:g}: at least {1 - moe.capacity_factor:.0%} of all "
            "choices are dropped, however evenly tokens choose"
        )


def _crowded(spec: Spec, nproc: int) -> Iterator[str]:
    here = cores()
    if spec.hardware.device != "cuda" and nproc > here:
        shared = f"{nproc} ranks share {counted(here, 'core')}"
        yield f"{shared}: slower steps, same results (--nproc {here}: a core for each)"
