"""Bytes of training state on one rank, by category, at three instants: arithmetic from Spec and layout alone.

The categories, each storage in one of them:

  parameters  what the rank owns: whole tensors, or shards padded to the size of the first one
  gathered    whole copies of sharded parameters
  gradients   whole or sharded, as the layout has them just then
  moments     AdamW's two, of exactly what is updated here
  buffers     memory of communication: DDP's buckets while no gradient is in them, input of a reduce-scatter
  on disk     moments in mapped files (`layout.offload = "disk"`), reserved from the beginning
  other       AdamW's step counters (four bytes a tensor), buffers of the model

The instants: "after init"; "between microbatches", as in every step but a run's first, which has no moments yet; and
"after the step". Not here: activations, what autocast keeps, workspaces, the allocator's rounding.

How the layouts hold their state is that of torch 2.13, read in its sources and held to by the tests:
DDP's buckets are as large as all gradients and stay, and while gradients are not reduced yet they are held beside
them (torch/csrc/distributed/c10d/reducer.cpp); FSDP2 computes with gathered copies beside its shards, keeps the input
of the last reduce-scatter until the next (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from fourfold.plan.parameters import router_correction
from fourfold.plan.shapes import Shape, parameter_shapes
from fourfold.plan.stages import TIED, held_by
from fourfold.spec.boxes import shard_range, stack_dim
from fourfold.spec.grid import Grid
from fourfold.spec.model import DecoderSpec, MlpSpec
from fourfold.spec.schedules import stages_in_all, stages_of
from fourfold.spec.spec import Spec
from fourfold.spec.training import PrecisionSpec

Category = Literal["parameters", "gathered", "gradients", "moments", "buffers", "on disk", "other"]
Instant = Literal["after init", "between microbatches", "after the step"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
INSTANTS: tuple[Instant, ...] = get_args(Instant)

MOMENTS = 2  # running means of the gradient and of its square: Kingma & Ba, arXiv 1412.6980, algorithm 1
STEP_BYTES = 4  # AdamW's count of the updates of one tensor, an fp32 number
ALIGNED_BYTES = 64  # where a slot of a mapped file may begin


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter on one rank, in elements.

    whole: after the cut of tensor or expert parallel; padded: of every shard; shards: over how many ranks it is cut.
    """

    block: int | None
    whole: int
    own: int
    padded: int
    shards: int


def rank_bytes(spec: Spec, rank: int) -> Mapping[Instant, Mapping[Category, int]] | None:
    """What `rank` of a settled Spec holds; None for a model whose shapes, or a layout whose state, is not known.

    "between microbatches" is left out where a step has only one, or a pipeline has several under way. Rank 0 holds the
    most of its stage: first shards are the largest.
    """
    parts, layout = parts_of(spec, rank), spec.layout
    if parts is None:
        return None
    each = element_bytes(spec.precision)
    engine = engine_of(spec)
    whole = each * sum(part.whole for part in parts)
    padded = each * sum(part.padded for part in parts)
    twins = sum((part.padded if engine == "zero" else part.whole) for part in twins_of(spec, rank))
    held = {"parameters": (padded if engine == "zero" else whole) + each * twins}
    corrections = each * _corrections(spec, rank)
    held["other"] = corrections
    if layout.offload == "disk":
        held["on disk"] = max(_in_file(parts, each), ALIGNED_BYTES)
    if engine == "ddp":
        held["buffers"] = whole
    updated = {"other": corrections + STEP_BYTES * len(parts)}
    if layout.offload != "disk":
        updated["moments"] = MOMENTS * each * sum(part.own for part in parts)
    instants = {"after init": held, "between microbatches": held | updated, "after the step": held | updated}
    between = instants["between microbatches"]
    if layout.zero in (1, 2) and engine == "zero":
        between["gathered"] = gathered_bytes(spec.precision) * _gathered(parts)
    reduced = layout.zero >= 2 and engine == "zero" and not spec.run.exact  # exact mode reduces once a step
    between["gradients"] = padded if reduced else whole
    if reduced:
        between["buffers"] = each * _gathered(_last_reduced(parts, spec))
    if spec.batch.accumulation == 1 or layout.pp > 1:
        del instants["between microbatches"]
    return {
        instant: {category: instants[instant].get(category, 0) for category in CATEGORIES}
        for instant in INSTANTS
        if instant in instants
    }


def engine_of(spec: Spec) -> Literal["alone", "ddp", "replicate", "zero"]:
    """What spreads a settled Spec's data parallel: nothing, torch's DDP, FSDP2's `replicate`, or FSDP2's shards."""
    layout = spec.layout
    grid = Grid.of(layout)
    if layout.zero and grid.degree("fsdp") > 1:
        return "zero"
    if grid.ep > 1:
        return "replicate"
    if grid.dp_replicate * grid.cp == 1:
        return "alone"
    return "replicate" if layout.tp * layout.pp > 1 else "ddp"


def parts_of(spec: Spec, rank: int) -> list[Part] | None:
    """Every parameter that `rank` holds, as it does; None where the shapes are not known."""
    shapes = parameter_shapes(spec.model)
    if shapes is None:
        return None
    grid = Grid.of(spec.layout)
    shards = grid.degree("fsdp") if spec.layout.zero else 0
    return [_part(shapes[name], grid, rank, shards) for name in _held(spec, shapes, rank)]


def twins_of(spec: Spec, rank: int) -> list[Part]:
    """The tied parameters that a rank of the first and the last stage has a second time."""
    shapes, layout, grid = parameter_shapes(spec.model), spec.layout, Grid.of(spec.layout)
    ends = {0, stages_in_all(layout) - 1}
    if shapes is None or layout.pp == 1 or not _is_tied(spec):
        return []
    if not ends <= {*stages_of(layout, grid.coordinate(rank)["pp"])}:
        return []
    return [_part(shapes[TIED], grid, rank, grid.degree("fsdp") if layout.zero else 0)]


def _held(spec: Spec, shapes: Mapping[str, Shape], rank: int) -> list[str]:
    """The parameters of the stages of `rank`, by name."""
    place = Grid.of(spec.layout).coordinate(rank)["pp"]
    return held_by(spec.layout, shapes, place, _is_tied(spec))


def _is_tied(spec: Spec) -> bool:
    return isinstance(spec.model, DecoderSpec) and spec.model.tied


def _part(shape: Shape, grid: Grid, rank: int, shards: int) -> Part:
    """shards: over how many ranks ZeRO cuts what is no stack of experts; 0: nothing is cut."""
    size, cut, axis = [*shape.size], shape.cut, "fsdp"
    if shape.stack and grid.ep > 1:  # whole experts
        size[0], cut, axis = size[0] // grid.ep, None, "efsdp"
        shards = shards and grid.degree(axis)
    elif cut is not None and (shape.parts is None or shape.parts % grid.tp == 0):
        _, size[cut] = shard_range(size[cut], grid.tp, grid.index(rank, "tp"))
    shards = max(shards, 1)
    dim = stack_dim(size, cut if grid.tp > 1 else None, shards) if shape.stack else 0
    length, whole = size[dim], math.prod(size)
    row = whole // length
    _, own = shard_range(length, shards, grid.index(rank, axis) % shards)
    _, first = shard_range(length, shards, 0)
    return Part(shape.block, whole, own * row, first * row, shards)


def _corrections(spec: Spec, rank: int) -> int:
    """Elements of the buffers by which routers are balanced: whole on every rank of their stage."""
    shapes = parameter_shapes(spec.model) or {}
    routers = {shapes[name].block for name in _held(spec, shapes, rank) if shapes[name].stack}
    moe = spec.model.moe if isinstance(spec.model, DecoderSpec) else None
    return 0 if moe is None else len(routers) * router_correction(moe)


def _gathered(parts: Iterable[Part]) -> int:
    """Elements of whole copies: all shards, with their padding."""
    return sum(part.shards * part.padded for part in parts)


def _last_reduced(parts: Iterable[Part], spec: Spec) -> list[Part]:
    """The unit whose reduce-scatter ends a backward: what is outside the blocks, for that takes the batch itself.

    Of an mlp the first block takes it too, without a gradient, and comes after it.
    """
    wrap = spec.layout.wrap
    if wrap == "model":
        return [*parts]
    if isinstance(spec.model, MlpSpec):
        return [part for part in parts if part.block is not None and part.block < wrap]
    return [part for part in parts if part.block is None]


def _in_file(parts: Iterable[Part], each: int) -> int:
    return sum(MOMENTS * -(-each * part.own // ALIGNED_BYTES) * ALIGNED_BYTES for part in parts)


def element_bytes(precision: PrecisionSpec) -> int:
    """Bytes of an element of what is updated, of its gradient and of its moments: 4, or 8 in fp64."""
    return 8 if precision.compute == "fp64" else 4


def gathered_bytes(precision: PrecisionSpec) -> int:
    """Bytes of an element of a gathered copy: half of fp32 where parameters are rounded to a narrow dtype first."""
    narrow = precision.parameters == "compute" and precision.compute in ("bf16", "fp16")
    return 2 if narrow else element_bytes(precision)


def textbook(zero: int, ranks: int, element: int = 4, mixed: bool = False) -> float:
    """Bytes of state per parameter as the paper counts them, at their most.

    Rajbhandari et al., arXiv 1910.02054, figure 1: with K = 12 bytes of fp32 copy and moments, 2 bytes each of
    parameter and gradient (mixed). Without mixed precision there are four parts of `element` bytes: parameter,
    gradient and two moments, of which stage 1 shards the moments, 2 the gradients too, 3 all.
    """
    parameter, gradient, rest = (2, 2, 12) if mixed else (element, element, 2 * element)
    return (
        parameter / (ranks if zero >= 3 else 1)
        + gradient / (ranks if zero >= 2 else 1)
        + rest / (ranks if zero >= 1 else 1)
    )


def beyond_textbook(spec: Spec) -> str:
    """Why a rank of a settled Spec holds something else than `textbook` says, in words."""
    engine, zero = engine_of(spec), spec.layout.zero
    if engine == "ddp":
        return (
            "DDP's buckets are as large as all gradients: while gradients are not reduced they are held beside them, "
            "and they stay when the gradients are dropped"
        )
    if engine != "zero":
        return "as the textbook has it; gradients are dropped after each step"
    input_kept = "; the input of the last unit's reduce-scatter is kept until the next one"
    if zero == 3:
        return (
            "as the textbook has it while no unit (what FSDP2 gathers at once) computes; one that does is held whole"
            + input_kept
        )
    return (
        "FSDP2 holds the shard that is updated and the gathered copy that is computed with, where the textbook counts "
        f"a parameter once. At the end of a step the copy is dropped, which the textbook keeps"
        f"{input_kept if zero == 2 else ''}"
    )
