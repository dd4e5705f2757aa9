"""Blocks shared out to stages: against every way there is, for small networks."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.shapes import parameter_shapes
from fourfold.plan.stages import block_costs, blocks_of_stages, held_by, split
from fourfold.spec.load import load_spec
from fourfold.spec.schedules import stages_in_all
from fourfold.spec.training import LayoutSpec


def dearest(costs, last, counts):
    ends = [0, *accumulate(counts)]
    sums = [sum(costs[a:b]) for a, b in pairwise(ends)]
    return max([*sums[:-1], sums[-1] + last])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 12), st.data())
def test_the_dearest_stage_is_as_cheap_as_can_be(costs, last, data):
    stages = data.draw(st.integers(1, len(costs)))
    counts = split(costs, last, stages)
    assert (len(counts), sum(counts), min(counts) >= 1) == (stages, len(costs), True)
    ways = [
        [b - a for a, b in pairwise([0, *cuts, len(costs)])]
        for cuts in combinations(range(1, len(costs)), stages - 1)
    ]
    assert dearest(costs, last, counts) == min(dearest(costs, last, way) for way in ways)


def test_equal_blocks_are_shared_out_evenly_and_the_head_counts():
    assert split([1] * 8, 0, 4) == [2, 2, 2, 2]
    assert split([1] * 8, 2, 4) == [2, 2, 3, 1]
    assert split([5, 5, 5], 0, 1) == [3]


def test_what_was_asked_for_is_kept():
    layout = LayoutSpec(pp=2, pp_split=(1, 3))
    assert blocks_of_stages(layout, [1] * 4, 100) == [range(1), range(1, 4)]


def test_cost_is_of_matrices_and_by_name():
    shapes = {"a.1.weight": (2, 3), "a.1.bias": (2,), "a.10.weight": (7, 1)}
    assert block_costs(["a.1", "a.10"], shapes) == [6, 7]


@given(st.sampled_from(["1f1b", "zbv", "looped-bfs"]), st.booleans())
def test_every_parameter_is_in_a_stage_and_only_a_tied_one_in_two(schedule, tied):
    spec = load_spec("tiny", [f"model.tied={str(tied).lower()}"]).spec
    shapes = parameter_shapes(spec.model)
    layout = LayoutSpec(pp=2, pp_schedule=schedule)
    assert stages_in_all(layout) <= spec.model.layers
    held = [held_by(layout, shapes, place, tied) for place in range(2)]
    assert {*held[0], *held[1]} == set(shapes)
    shared = {*held[0]} & {*held[1]}
    assert shared == ({"embedding.weight"} if tied and schedule != "zbv" else set())
    assert held_by(LayoutSpec(), shapes, 0, tied) == list(shapes)
