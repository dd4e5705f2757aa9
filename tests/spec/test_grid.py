"""Rank arithmetic: properties, and agreement with torch's device mesh."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.spec.degrees import divisors
from fourfold.spec.errors import SpecError
from fourfold.spec.grid import AXES, BORROWED, GROUPS, Grid
from fourfold.spec.training import LayoutSpec

unhurried = settings(deadline=None, max_examples=60)
degrees = st.integers(1, 3)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    mesh = {axis: draw(degrees) for axis in AXES}
    ep = draw(st.sampled_from(divisors(math.prod(mesh[axis] for axis in BORROWED))))
    return Grid(**mesh, ep=ep)


# ------------------------------------------------------------------------------------------- rank ↔ coordinate


def test_ranks_are_row_major() -> None:
    grid = Grid(pp=2, dp_replicate=2, tp=2)
    assert grid.world == 8
    assert grid.coordinate(5) == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert list(grid.coordinate(5)) == list(AXES)
    assert grid.rank({"pp": 1, "tp": 1}) == 5


@unhurried
@given(grids())
def test_rank_and_coordinate_are_inverse(grid: Grid) -> None:
    everywhere = itertools.product(*(range(grid.degree(axis)) for axis in AXES))
    for rank, place in enumerate(everywhere):
        assert grid.coordinate(rank) == dict(zip(AXES, place, strict=True))
        assert grid.rank(grid.coordinate(rank)) == rank
    assert rank == grid.world - 1


def test_one_rank() -> None:
    grid = Grid()
    assert grid.world == 1
    assert grid.coordinate(0) == dict.fromkeys(AXES, 0)
    assert all(grid.groups(axis) == ((0,),) for axis in GROUPS)


@pytest.mark.parametrize("rank", [-1, 8])
def test_rank_outside(rank: int) -> None:
    grid = Grid(dp_replicate=8)
    with pytest.raises(SpecError, match="a rank from 0 to 7"):
        grid.coordinate(rank)
    with pytest.raises(SpecError, match="a rank from 0 to 7"):
        grid.group_of(rank, "dp")


@pytest.mark.parametrize(
    ("place", "says"),
    [({"tp": 2}, "tp has degree 2"), ({"tp": -1}, "tp has degree 2"), ({"tq": 0}, 'the mesh axis "tq"')],
)
def test_coordinate_outside(place: Mapping[str, int], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Grid(tp=2).rank(place)


# ------------------------------------------------------------------------------------------------------ groups


def test_groups_of_a_grid() -> None:
    grid = Grid(pp=2, dp_replicate=2, tp=2, ep=2)
    assert grid.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.groups("dp_replicate") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.groups("cp") == tuple((rank,) for rank in range(8))
    assert grid.groups("world") == (tuple(range(8)),)


def test_ep_takes_tp_then_cp_then_dp_shard() -> None:
    grid = Grid(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4)
    assert grid.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert grid.groups("edp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))


@unhurried
@given(grids())
def test_groups_cut_the_world_into_equal_parts(grid: Grid) -> None:
    for axis in GROUPS:
        groups = grid.groups(axis)
        assert {len(group) for group in groups} == {grid.degree(axis)}
        assert sorted(itertools.chain(*groups)) == list(range(grid.world))
        assert all(list(group) == sorted(group) for group in groups)
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
        for group in groups:
            for index, rank in enumerate(group):
                assert grid.group_of(rank, axis) == group
                assert grid.index(rank, axis) == index


@unhurried
@given(grids())
def test_a_group_differs_in_its_axes_only(grid: Grid) -> None:
    members = {axis: (axis,) for axis in AXES} | {
        "dp": ("dp_replicate", "dp_shard"),
        "fsdp": ("dp_shard", "cp"),
    }
    for name, axes in members.items():
        for group in grid.groups(name):
            places = [grid.coordinate(rank) for rank in group]
            assert {tuple(place[axis] for axis in AXES if axis not in axes) for place in places} == {
                tuple(places[0][axis] for axis in AXES if axis not in axes)
            }


@unhurried
@given(grids())
def test_ep_stays_inside_a_stage_and_a_replica(grid: Grid) -> None:
    for group in grid.groups("ep"):
        assert group == tuple(range(group[0], group[0] + grid.ep))
        places = [grid.coordinate(rank) for rank in group]
        assert len({(place["pp"], place["dp_replicate"]) for place in places}) == 1
    for group in grid.groups("edp"):
        assert len({grid.index(rank, "ep") for rank in group}) == 1
        assert len({grid.coordinate(rank)["pp"] for rank in group}) == 1
    assert grid.degree("ep") * grid.degree("edp") * grid.pp == grid.world


@pytest.mark.parametrize("ask", [Grid().groups, Grid().degree, lambda axis: Grid().index(0, axis)])
def test_unknown_axis_gets_the_nearest(ask: Any) -> None:
    with pytest.raises(SpecError, match="type:  dp_shard"):
        ask("dp_shards")


# -------------------------------------------------------------------------------------------- what is no grid


def test_ep_must_divide() -> None:
    with pytest.raises(SpecError) as error:
        Grid(dp_replicate=3, dp_shard=4, tp=2, ep=3)
    assert "dp_shard 4 × cp 1 × tp 2 = 8" in str(error.value)
    assert "--set layout.ep=4 or --set layout.ep=2" in str(error.value)


def test_all_bad_degrees_at_once() -> None:
    with pytest.raises(SpecError) as error:
        Grid(pp=0, tp=-2, ep=0)
    assert [problem.asked for problem in error.value.problems] == [
        "layout.pp = 0",
        "layout.tp = -2",
        "layout.ep = 0",
    ]


def test_of_a_layout() -> None:
    layout = LayoutSpec(pp=2, dp_replicate=3, dp_shard=4, cp=5, tp=6, ep=8)
    assert Grid.of(layout) == Grid(pp=2, dp_replicate=3, dp_shard=4, cp=5, tp=6, ep=8)
    with pytest.raises(SpecError, match="settle the layout"):
        Grid.of(LayoutSpec())


# ------------------------------------------------------------------------------------------------------- torch

MESHES = [
    (1, 8, 1, 1, 1),
    (2, 2, 1, 1, 2),
    (2, 1, 2, 1, 2),
    (1, 2, 2, 2, 1),
    (1, 1, 2, 2, 2),
    (3, 1, 1, 2, 1),
]

# One interpreter for all meshes and ranks; "fake" is torch's process group that talks to nobody.
PROBE = """
import json, math, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

axes, meshes = json.loads(sys.argv[1])
seen = []
for shape in meshes:
    for rank in range(math.prod(shape)):
        dist.init_process_group("fake", rank=rank, world_size=math.prod(shape), store=FakeStore())
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(axes))
        ranks = lambda name: dist.get_process_group_ranks(mesh.get_group(name))
        groups = {axis: ranks(axis) for axis in axes}
        for name, parts in {"dp": ("dp_replicate", "dp_shard"), "fsdp": ("dp_shard", "cp")}.items():
            groups[name] = dist.get_process_group_ranks(mesh[parts]._flatten(name).get_group())
        borrowed = math.prod(shape[2:])
        for ep in (d for d in range(1, borrowed + 1) if borrowed % d == 0):
            names = ("pp", "dp_replicate", "rest", "ep")
            experts = init_device_mesh("cpu", (*shape[:2], borrowed // ep, ep), mesh_dim_names=names)
            groups[f"ep {ep}"] = dist.get_process_group_ranks(experts.get_group("ep"))
            edp = experts["dp_replicate", "rest"]._flatten("edp").get_group()
            groups[f"edp {ep}"] = dist.get_process_group_ranks(edp)
        seen.append({"shape": shape, "rank": rank, "place": mesh.get_coordinate(), "groups": groups})
        dist.destroy_process_group()
print(json.dumps(seen))
"""


def run_probe(source: str, tmp_path: Path, *arguments: Any) -> Any:
    """What a fresh interpreter prints, as JSON."""
    script = tmp_path / "probe.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_torch_mesh_has_the_same_coordinates_and_groups(tmp_path: Path) -> None:
    seen = run_probe(PROBE, tmp_path, AXES, MESHES)
    assert len(seen) == sum(math.prod(shape) for shape in MESHES)
    for one in seen:
        mesh, rank = dict(zip(AXES, one["shape"], strict=True)), one["rank"]
        assert list(Grid(**mesh).coordinate(rank).values()) == one["place"]
        for name, ranks in one["groups"].items():
            axis, _, ep = name.partition(" ")
            assert list(Grid(**mesh, ep=int(ep or 1)).group_of(rank, axis)) == ranks, (one["shape"], name)


def test_groups_that_leave_a_node() -> None:
    grid = Grid(pp=2, dp_shard=2, tp=4, ep=4)
    assert [grid.crossing(axis, 8) for axis in GROUPS] == [8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert grid.crossing("tp", 6) == 1 and grid.crossing("tp", 1) == 4 and grid.crossing("world", 16) == 0
    with pytest.raises(SpecError):
        grid.crossing("tq", 8)
