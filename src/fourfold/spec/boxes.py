"""Who holds which box of a tensor: an offset and a size per dim, from shape, placements and rank.

The cuts are those of torch's DTensor and FSDP2: a dim of length n over p ranks gives each rank ceil(n / p)
elements until they run out, so the last shards may be smaller or empty. Several axes may cut one dim; each
cuts what the ones before it left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import combinations

from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.grid import AXES, GROUPS, PRODUCTS, Grid


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: `offset` and `size` in elements, one of each per dim; () and () for a scalar."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements inside: 1 for a scalar, 0 for an empty box."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index the whole tensor with."""
        pairs = zip(self.offset, self.size, strict=True)
        return tuple(slice(start, start + length) for start, length in pairs)


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranks along an axis cut tensor dim `dim` between them."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along an axis holds the same."""


Placements = Mapping[str, Shard | Replicate]  # by mesh axis or named product; an axis left out replicates


def shard_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, size) of shard `index` of `length` elements cut in `parts`; an empty one begins at the end.

    Source: torch.chunk, as used by DTensor's `Shard.local_shard_size_and_offset` and by FSDP2.
    Raises SpecError for a shard that does not exist.
    """
    if length < 0 or not 0 <= index < parts:
        raise SpecError(
            Problem(
                asked=f"shard {index} of {length} elements cut in {parts}",
                found="no such shard",
                why="shards count from 0 to parts - 1, and a length is not negative",
                instead=f"an index from 0 to {max(parts - 1, 0)}, a length of at least 0",
            )
        )
    each = -(-length // parts)
    offset = min(each * index, length)
    return offset, min(each, length - offset)


def stack_dim(size: Sequence[int], cut: int | None, ranks: int) -> int:
    """The dim over which ZeRO cuts a stack of experts of `size` [experts, ...] between `ranks`.

    The first that divides, but for one that is `cut` already, and the last, whose rows stay whole (the norm of exact
    mode is summed by row): there are often fewer experts than ranks, and some of these would hold none. Where no dim
    divides it is 0.
    """
    return next((dim for dim, length in enumerate(size[:-1]) if dim != cut and length % ranks == 0), 0)


def box_of(
    shape: Sequence[int], placements: Placements, grid: Grid, rank: int, order: Sequence[str] | None = None
) -> Box:
    """The box of a tensor of `shape` that `rank` holds.

    placements: which axes cut which dim, by axis or product ("fsdp" cuts once, into dp_shard × cp shards).
    order: the axes in the order in which they cut. Default: mesh order, outermost first, so that later mesh
        axes subdivide earlier ones' shards, as in DTensor. FSDP2 over a tensor-parallel dim: ("tp", "fsdp").
    An empty box begins at the end of the dim used up, as `compute_local_shape_and_global_offset` has it.
    Raises SpecError for an axis or a dim that does not exist, and for axes that share ranks ("fsdp", "cp").
    """
    return _cut(shape, placements, grid, rank, _cutting_order(shape, placements, grid, order))


def owners(
    shape: Sequence[int], placements: Placements, grid: Grid, order: Sequence[str] | None = None
) -> dict[Box, tuple[int, ...]]:
    """Every box that holds something, and the ranks that hold it, ascending: more than one are replicas.

    The boxes do not overlap and together are the whole tensor. Arguments and errors as in `box_of`.
    """
    axes = _cutting_order(shape, placements, grid, order)
    held: dict[Box, list[int]] = {}
    for rank in range(grid.world):
        box = _cut(shape, placements, grid, rank, axes)
        if box.elements:
            held.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in held.items()}


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common; None if nothing. Two scalars meet in the scalar."""
    assert len(a.size) == len(b.size), f"boxes of different tensors: {a}, {b}"
    starts = tuple(max(pair) for pair in zip(a.offset, b.offset, strict=True))
    ends = (
        min(a_start + a_size, b_start + b_size)
        for a_start, a_size, b_start, b_size in zip(a.offset, a.size, b.offset, b.size, strict=True)
    )
    size = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, size) if all(length > 0 for length in size) else None


def _cut(shape: Sequence[int], placements: Placements, grid: Grid, rank: int, axes: Sequence[str]) -> Box:
    offset, size = [0] * len(shape), list(shape)
    for axis in axes:
        placement = placements[axis]
        assert isinstance(placement, Shard)
        dim = placement.dim
        start, size[dim] = shard_range(size[dim], grid.degree(axis), grid.index(rank, axis))
        offset[dim] = offset[dim] + start if size[dim] else shape[dim]
    return Box(tuple(offset), tuple(size))


def _cutting_order(
    shape: Sequence[int], placements: Placements, grid: Grid, order: Sequence[str] | None
) -> list[str]:
    """The axes that cut, in the order in which they do; all that is wrong with them as one SpecError."""
    problems = [_unknown(axis) for axis in placements if axis not in GROUPS]
    shards = {axis: place.dim for axis, place in placements.items() if isinstance(place, Shard)}
    problems += [_no_dim(axis, dim, shape) for axis, dim in shards.items() if not 0 <= dim < len(shape)]
    known = sorted((axis for axis in shards if axis in GROUPS), key=_mesh_place)
    for one, other in combinations(known, 2):
        if len(set(grid.group_of(0, one)) & set(grid.group_of(0, other))) > 1:
            problems.append(_overlap(one, other))
    if order is not None and sorted(order) != sorted(shards):
        problems.append(_wrong_order(order, known))
    if problems:
        raise SpecError(problems)
    return list(order) if order is not None else known


def _mesh_place(axis: str) -> int:
    """Where an axis, or the outermost axis of a product, stands in the mesh; the borrowed ep is innermost."""
    if axis == "ep":
        return len(AXES)
    if axis == "efsdp":
        return AXES.index("dp_shard")
    first = "dp_replicate" if axis == "edp" else PRODUCTS.get(axis, (axis,))[0]
    return AXES.index(first)


def _unknown(axis: str) -> Problem:
    return Problem(
        asked=f'a placement along "{axis}"',
        found=f"axes {', '.join(GROUPS)}",
        why="no mesh axis or product of axes has that name",
        instead=get_close_matches(axis, GROUPS, n=1, cutoff=0.0)[0],
    )


def _no_dim(axis: str, dim: int, shape: Sequence[int]) -> Problem:
    return Problem(
        asked=f"{axis} cuts dim {dim}",
        found=f"a tensor of shape {tuple(shape)}",
        why=f"it has dims 0 to {len(shape) - 1}" if shape else "a scalar has no dim to cut",
        instead=f"Shard({len(shape) - 1})" if shape else "Replicate()",
    )


def _overlap(one: str, other: str) -> Problem:
    return Problem(
        asked=f"both {one} and {other} cut the tensor",
        found=f"ranks that differ along {one} differ along {other} too",
        why="ranks can be told apart only once, or some part of the tensor is on no rank",
        instead=f"Shard along {one} or along {other}, not both",
    )


def _wrong_order(order: Sequence[str], shards: Sequence[str]) -> Problem:
    return Problem(
        asked=f"cuts in the order {', '.join(order)}",
        found=f"cuts along {', '.join(shards) or 'no axis'}",
        why="the order must name every axis that cuts, once, and no other",
        instead=f"order={tuple(shards)}",
    )
