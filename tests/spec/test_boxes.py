"""Who holds which box: properties, and agreement with torch's chunks, DTensor and FSDP2."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Placement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from fourfold.spec.boxes import Box, Replicate, Shard, box_of, intersect, owners, shard_range
from fourfold.spec.errors import SpecError
from fourfold.spec.grid import AXES, Grid

unhurried = settings(deadline=None, max_examples=100)
grids = st.builds(Grid, **{axis: st.integers(1, 3) for axis in AXES})


@st.composite
def shapes_and_placements(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Shard | Replicate]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    dims = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return shape, draw(st.dictionaries(st.sampled_from(AXES), st.sampled_from(dims)))


# -------------------------------------------------------------------------------------------------- shard_range


def test_uneven_and_empty_shards() -> None:
    assert [shard_range(5, 4, index) for index in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert shard_range(0, 3, 2) == (0, 0)
    assert shard_range(7, 1, 0) == (0, 7)


@unhurried
@given(st.integers(0, 40), st.integers(1, 12))
def test_shards_are_torch_chunks(length: int, parts: int) -> None:
    whole = torch.arange(length)
    chunks = torch.chunk(whole, parts)
    for index in range(parts):
        offset, size = shard_range(length, parts, index)
        expected = chunks[index] if index < len(chunks) else whole[:0]
        assert whole[offset : offset + size].tolist() == expected.tolist()


@pytest.mark.parametrize(("length", "parts", "index"), [(4, 2, 2), (4, 2, -1), (4, 0, 0), (-1, 2, 0)])
def test_no_such_shard(length: int, parts: int, index: int) -> None:
    with pytest.raises(SpecError, match="no such shard"):
        shard_range(length, parts, index)


# ------------------------------------------------------------------------------------------------------- box_of


def test_later_axes_subdivide_earlier_ones() -> None:
    grid = Grid(dp_shard=2, tp=2)
    placements = {"tp": Shard(0), "dp_shard": Shard(0)}
    assert [box_of([6, 4], placements, grid, rank) for rank in range(4)] == [
        Box((0, 0), (2, 4)),
        Box((2, 0), (1, 4)),
        Box((3, 0), (2, 4)),
        Box((5, 0), (1, 4)),
    ]


def test_two_dims() -> None:
    boxes = [
        box_of((3, 5), {"dp_shard": Shard(0), "tp": Shard(1)}, Grid(dp_shard=2, tp=2), r) for r in range(4)
    ]
    assert boxes == [
        Box((0, 0), (2, 3)),
        Box((0, 3), (2, 2)),
        Box((2, 0), (1, 3)),
        Box((2, 3), (1, 2)),
    ]


def test_fsdp_cuts_once_over_two_axes() -> None:
    grid = Grid(dp_shard=2, cp=2)
    once = [box_of((5,), {"fsdp": Shard(0)}, grid, rank).size[0] for rank in range(4)]
    twice = [box_of((5,), {"dp_shard": Shard(0), "cp": Shard(0)}, grid, rank).size[0] for rank in range(4)]
    assert once == [2, 2, 1, 0]
    assert twice == [2, 1, 1, 1]


def test_experts_over_the_borrowed_axis() -> None:
    grid = Grid(dp_shard=4, tp=2, ep=4)
    held = owners((4, 6), {"ep": Shard(0), "edp": Shard(1)}, grid)
    assert held == {
        Box((expert, 3 * half), (1, 3)): (4 * half + expert,) for half in (0, 1) for expert in range(4)
    }


def test_a_scalar_is_on_every_rank() -> None:
    grid = Grid(dp_replicate=2, tp=2)
    assert owners((), {"tp": Replicate()}, grid) == {Box((), ()): (0, 1, 2, 3)}
    assert Box((), ()).elements == 1
    assert Box((), ()).slices == ()


def test_slices_take_the_box_out_of_the_whole() -> None:
    whole = np.arange(12).reshape(3, 4)
    assert whole[Box((1, 2), (2, 2)).slices].tolist() == [[6, 7], [10, 11]]


@pytest.mark.parametrize(
    ("placements", "order", "says"),
    [
        ({"tpp": Shard(0)}, None, 'a placement along "tpp"'),
        ({"tp": Shard(2)}, None, "it has dims 0 to 1"),
        ({"tp": Shard(-1)}, None, "it has dims 0 to 1"),
        ({"fsdp": Shard(0), "cp": Shard(1)}, None, "both fsdp and cp cut"),
        ({"ep": Shard(0), "tp": Shard(1)}, None, "both tp and ep cut"),
        ({"tp": Shard(0)}, ("cp", "tp"), "order=('tp',)"),
        ({"tp": Shard(0)}, (), "order=('tp',)"),
    ],
)
def test_impossible_placements(
    placements: Mapping[str, Shard], order: Sequence[str] | None, says: str
) -> None:
    with pytest.raises(SpecError) as error:
        box_of((4, 4), placements, Grid(dp_shard=2, cp=2, tp=2, ep=4), 0, order)
    assert says in str(error.value)


def test_a_scalar_cannot_be_cut() -> None:
    with pytest.raises(SpecError, match="a scalar has no dim to cut"):
        box_of((), {"tp": Shard(0)}, Grid(tp=2), 0)


def test_all_impossible_placements_at_once() -> None:
    with pytest.raises(SpecError) as error:
        owners(
            (4,), {"tp": Shard(3), "xx": Replicate(), "dp": Shard(0), "dp_shard": Shard(0)}, Grid(dp_shard=2)
        )
    assert len(error.value.problems) == 3


# ------------------------------------------------------------------------------------------------------- owners


@unhurried
@given(grids, shapes_and_placements())
def test_owners_hold_the_whole_tensor_once(
    grid: Grid, case: tuple[tuple[int, ...], dict[str, Shard | Replicate]]
) -> None:
    shape, placements = case
    held = owners(shape, placements, grid)
    covered = np.zeros(shape, dtype=int)
    cuts = math.prod(grid.degree(axis) for axis, place in placements.items() if isinstance(place, Shard))
    for box, ranks in held.items():
        covered[box.slices] += 1
        assert len(ranks) == grid.world // cuts
        assert all(box_of(shape, placements, grid, rank) == box for rank in ranks)
    assert (covered == 1).all()
    for rank in range(grid.world):
        box = box_of(shape, placements, grid, rank)
        assert (rank in held.get(box, ())) == (box.elements > 0)


# ---------------------------------------------------------------------------------------------------- intersect


def test_intersections() -> None:
    assert intersect(Box((0, 0), (4, 4)), Box((2, 3), (4, 4))) == Box((2, 3), (2, 1))
    assert intersect(Box((0,), (2,)), Box((2,), (2,))) is None
    assert intersect(Box((1,), (0,)), Box((0,), (4,))) is None
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    with pytest.raises(AssertionError, match="different tensors"):
        intersect(Box((0,), (1,)), Box((0, 0), (1, 1)))


sides = st.tuples(st.integers(0, 6), st.integers(0, 6))


@unhurried
@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=3))
def test_intersection_is_what_both_hold(sides_of: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    a, b = (
        Box(tuple(side[which][0] for side in sides_of), tuple(side[which][1] for side in sides_of))
        for which in (0, 1)
    )

    def inside(box: Box) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(part.start, part.stop) for part in box.slices)))

    common = intersect(a, b)
    assert common == intersect(b, a)
    assert (inside(common) if common else set()) == inside(a) & inside(b)


@unhurried
@given(grids, grids, shapes_and_placements(), st.data())
def test_resharding_moves_every_element_once(
    before: Grid, after: Grid, case: tuple[tuple[int, ...], dict[str, Shard | Replicate]], data: st.DataObject
) -> None:
    shape, placements = case
    others = {axis: place for axis, place in placements.items() if data.draw(st.booleans())}
    sources = owners(shape, placements, before)
    for target in owners(shape, others, after):
        parts = [part for source in sources if (part := intersect(source, target))]
        assert sum(part.elements for part in parts) == target.elements


# -------------------------------------------------------------------------------------------------------- torch


@unhurried
@given(grids, shapes_and_placements())
def test_boxes_are_dtensor_boxes(
    grid: Grid, case: tuple[tuple[int, ...], dict[str, Shard | Replicate]]
) -> None:
    shape, placements = case
    torch_placements: list[Placement] = [
        TorchShard(place.dim) if isinstance(place := placements.get(axis), Shard) else TorchReplicate()
        for axis in AXES
    ]
    mesh = tuple(grid.degree(axis) for axis in AXES)
    for rank in range(grid.world):
        place = list(grid.coordinate(rank).values())
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, place, torch_placements)
        assert box_of(shape, placements, grid, rank) == Box(tuple(offset), tuple(size)), (rank, place)


# What real DTensors, and a real FSDP2 wrap over tensor parallel, hold on each rank of a process group that talks to
# nobody: the content, for torch's own offsets go stale when a second mesh is made in one process.
PROBE = """
import json, math, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

axes, cases = json.loads(sys.argv[1])
seen = []
for rank in range(8):
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (1, 2, 2, 1, 2), mesh_dim_names=tuple(axes))
    for shape, cuts in cases:
        placements = [Shard(cuts[axis]) if axis in cuts else Replicate() for axis in axes]
        size, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
        whole = torch.arange(math.prod(shape)).reshape(shape)
        local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        seen.append([rank, shape, cuts, None, local.flatten().tolist(), list(offset), list(size)])
    model = torch.nn.Linear(4, 8, bias=False)
    model.weight.data = torch.arange(32.0).reshape(8, 4)
    parallelize_module(model, mesh["tp"], ColwiseParallel(), src_data_rank=None)
    fully_shard(model, mesh=mesh["dp_shard"])
    held = [int(value) for value in model.weight.to_local().flatten()]
    seen.append([rank, [8, 4], {"dp_shard": 0, "tp": 0}, ["tp", "dp_shard"], held, None, None])
    dist.destroy_process_group()
print(json.dumps(seen))
"""

CASES = [
    ([], {}),
    ([5], {"tp": 0}),
    ([5, 3], {"dp_shard": 0, "tp": 0}),
    ([5, 3], {"dp_replicate": 0, "dp_shard": 0, "tp": 0}),
    ([1, 3], {"dp_shard": 0, "tp": 1}),
    ([7, 2, 3], {"dp_replicate": 2, "dp_shard": 0, "tp": 2}),
    ([0, 4], {"tp": 0}),
]


def test_boxes_are_those_of_real_dtensors_and_fsdp2(tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([AXES, CASES])], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    seen: list[list[Any]] = json.loads(done.stdout)
    assert len(seen) == 8 * (len(CASES) + 1)
    grid = Grid(dp_replicate=2, dp_shard=2, tp=2)
    for rank, shape, cuts, order, held, offset, size in seen:
        box = box_of(shape, {axis: Shard(dim) for axis, dim in cuts.items()}, grid, rank, order)
        whole = np.arange(math.prod(shape)).reshape(shape)
        assert whole[box.slices].flatten().tolist() == held, (rank, shape, cuts)
        if offset is not None:
            assert box == Box(tuple(offset), tuple(size)), (rank, shape, cuts)
