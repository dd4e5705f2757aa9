"""Ranks on the mesh: rank ↔ coordinate, and the groups of ranks that talk along each axis.

The mesh has the axes of `AXES`, outermost first; ranks count row-major, as in torch's `init_device_mesh`, so
neighbours along the last axis have neighbouring ranks. Some products of axes have names of their own, and one
axis, `ep`, is borrowed: it cuts the ranks of dp_shard × cp × tp another way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product

from fourfold.spec.degrees import nearest_divisors
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.training import LayoutSpec
from fourfold.spec.words import counted

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
BORROWED = ("dp_shard", "cp", "tp")
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),  # ranks that see different samples
    "fsdp": ("dp_shard", "cp"),  # ranks over which ZeRO cuts parameters, gradients and moments
    "world": AXES,
}
GROUPS = (*AXES, "dp", "fsdp", "ep", "edp", "efsdp", "world")


@dataclass(frozen=True, slots=True)
class Grid:
    """The mesh of a settled layout: one rank in every cell.

    Degrees are counts of ranks along an axis; `ep` must divide dp_shard × cp × tp. Who forms an ep group:
    the dp_shard × cp × tp ranks of one pipeline stage and one replica are neighbours by number, and each run
    of `ep` of them is a group; so it takes up tp first, then cp, then dp_shard. Its ranks hold different
    experts. `edp`, its data-parallel complement, joins the ranks of one pipeline stage that hold the same
    experts, over all replicas; `efsdp` those of one replica, over which ZeRO cuts these experts.
    Raises SpecError where a degree is below 1 or `ep` does not divide.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        problems = [_not_a_degree(axis, self.degree(axis)) for axis in AXES if self.degree(axis) < 1]
        if self.ep < 1:
            problems.append(_not_a_degree("ep", self.ep))
        elif not problems and self._borrowed % self.ep:
            problems.append(_ep_does_not_divide(self))
        if problems:
            raise SpecError(problems)

    @classmethod
    def of(cls, layout: LayoutSpec) -> Grid:
        """The grid of a settled layout. Raises SpecError while a degree is still "auto"."""
        degrees: dict[str, int] = {}
        for axis in (*AXES, "ep"):
            degree = getattr(layout, axis)
            if degree == "auto":
                raise SpecError(
                    Problem(
                        asked=f'the grid of a layout with layout.{axis} = "auto"',
                        found="a layout that has not met its world size",
                        why='"auto" is what the world size leaves over',
                        instead=f"settle the layout for a world size first, or --set layout.{axis}=1",
                    )
                )
            degrees[axis] = degree
        return cls(**degrees)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return math.prod(self.degree(axis) for axis in AXES)

    def degree(self, axis: str) -> int:
        """Ranks in one group of `axis` (any of `GROUPS`)."""
        if axis in AXES:
            return int(getattr(self, axis))
        return math.prod(degree for degree, _ in self._dims(axis)[0])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where `rank` stands: its index on every axis of `AXES`, in that order."""
        self._check_rank(rank)
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.degree(axis))
        return {axis: place[axis] for axis in AXES}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank that stands at `coordinate`; axes it leaves out are at 0."""
        rank = 0
        for axis in AXES:
            index = coordinate.get(axis, 0)
            if not 0 <= index < self.degree(axis):
                raise SpecError(
                    Problem(
                        asked=f"the rank at {axis} {index}",
                        found=f"{axis} has degree {self.degree(axis)}",
                        why="indices on an axis count from 0 up to its degree - 1",
                        instead=f"an index from 0 to {self.degree(axis) - 1}",
                    )
                )
            rank = rank * self.degree(axis) + index
        if unknown := set(coordinate) - set(AXES):
            raise SpecError(_unknown_axis(sorted(unknown)[0], AXES))
        return rank

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `axis` (any of `GROUPS`): ranks ascending in a group, groups by their first rank.

        Every rank is in exactly one group. `dp` is dp_replicate × dp_shard, `fsdp` is dp_shard × cp; for `ep`,
        `edp` and `efsdp` see the class.
        """
        inside, between = self._dims(axis)
        offsets = _sums(inside)
        return tuple(tuple(first + offset for offset in offsets) for first in _sums(between))

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The group of `axis` that holds `rank`."""
        self._check_rank(rank)
        inside, between = self._dims(axis)
        first = sum(rank // stride % degree * stride for degree, stride in between)
        return tuple(first + offset for offset in _sums(inside))

    def index(self, rank: int, axis: str) -> int:
        """The place of `rank` in its group of `axis`, from 0."""
        self._check_rank(rank)
        index = 0
        for degree, stride in self._dims(axis)[0]:
            index = index * degree + rank // stride % degree
        return index

    def crossing(self, axis: str, devices_per_node: int) -> int:
        """How many groups of `axis` (any of `GROUPS`) have ranks on more than one node.

        A node has `devices_per_node` ranks that follow each other, the last one perhaps fewer.
        """
        return sum(
            group[0] // devices_per_node != group[-1] // devices_per_node for group in self.groups(axis)
        )

    @property
    def _borrowed(self) -> int:
        return math.prod(self.degree(axis) for axis in BORROWED)

    def _dims(self, axis: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(degree, stride in ranks) of the dims inside a group of `axis`, and of those between its groups."""
        if axis not in GROUPS:
            raise SpecError(_unknown_axis(axis, GROUPS))
        if axis in ("ep", "edp", "efsdp"):
            degrees = {"pp": self.pp, "dp_replicate": self.dp_replicate}
            degrees |= {"rest": self._borrowed // self.ep, "ep": self.ep}
            of_axis = {"ep": ("ep",), "edp": ("dp_replicate", "rest"), "efsdp": ("rest",)}
            members: tuple[str, ...] = of_axis[axis]
        else:
            degrees = {name: self.degree(name) for name in AXES}
            members = PRODUCTS.get(axis, (axis,))
        inside: list[tuple[int, int]] = []
        between: list[tuple[int, int]] = []
        stride = 1
        for name in reversed(degrees):
            (inside if name in members else between).append((degrees[name], stride))
            stride *= degrees[name]
        return inside[::-1], between[::-1]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise SpecError(
                Problem(
                    asked=f"the place of rank {rank}",
                    found=f"a grid of {counted(self.world, 'rank')}",
                    why="ranks count from 0 up to the world size - 1",
                    instead=f"a rank from 0 to {self.world - 1}",
                )
            )


def _sums(dims: Iterable[tuple[int, int]]) -> list[int]:
    """Every sum of one multiple of each stride, row-major, hence ascending."""
    return [sum(parts) for parts in product(*(range(0, degree * stride, stride) for degree, stride in dims))]


def _not_a_degree(axis: str, degree: int) -> Problem:
    return Problem(
        asked=f"layout.{axis} = {degree}",
        found="a degree below 1",
        why="a degree is a count of ranks; 1 means the axis is not used",
        instead=f"--set layout.{axis}=1",
    )


def _ep_does_not_divide(grid: Grid) -> Problem:
    cells = grid.dp_shard * grid.cp * grid.tp
    nearest = nearest_divisors(cells, to=grid.ep)
    return Problem(
        asked=f"layout.ep = {grid.ep}",
        found=f"dp_shard {grid.dp_shard} × cp {grid.cp} × tp {grid.tp} = {counted(cells, 'rank')} to borrow from",
        why=f"ep cuts those ranks into equal groups, and {cells} is not a multiple of {grid.ep}",
        instead=" or ".join(f"--set layout.ep={degree}" for degree in nearest),
    )


def _unknown_axis(axis: str, known: tuple[str, ...]) -> Problem:
    near = get_close_matches(axis, known, n=1, cutoff=0.0)[0]
    return Problem(
        asked=f'the mesh axis "{axis}"',
        found=f"axes {', '.join(known)}",
        why="no mesh axis or product of axes has that name",
        instead=near,
    )
