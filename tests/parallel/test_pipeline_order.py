"""The order of actions is torch's: what it refuses, what it prints of its own, what the formulas say of it."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from fourfold.parallel.pipeline_order import orders_of, stages_of_ranks
from fourfold.plan.pipeline_schedules import bubble_by_formula, why_not
from fourfold.plan.pipeline_time import Costs, timeline
from fourfold.spec.schedules import SCHEDULES


def per_rank(name: str) -> int:
    return 2 if SCHEDULES[name].several else 1


def printed(name: str, ranks: int, microbatches: int) -> list[list[tuple[object, ...]]]:
    """The order that torch shows."""
    shown = get_schedule_ops(
        SCHEDULES[name].torch_class.removeprefix("Schedule"), ranks, microbatches, per_rank(name)
    )
    return [
        [
            (each.stage_index, each.computation_type.value, each.microbatch_index)
            for action in own
            if action is not None
            for each in action.sub_actions or [action]
            if each.is_compute_op
        ]
        for own in shown
    ]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_it_is_what_torch_prints_but_for_1f1b_on_the_last_rank(name):
    orders = [list(map(tuple, own)) for own in orders_of(name, 3, 6, per_rank(name))]
    shown = printed(name, 3, 6)
    assert orders[:-1] == shown[:-1]
    if name != "1f1b":
        assert orders[-1] == shown[-1]
    else:  # torch 2.13 prints microbatches 1 to 6 there
        assert [m for _, kind, m in orders[-1] if kind == "F"] == list(range(6))
        assert [m for _, kind, m in shown[-1] if kind == "F"] == list(range(1, 7))


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_torch_refuses_what_is_said_to_be_refused(name):
    for ranks in (2, 3):
        for microbatches in range(1, 11):
            if why_not(name, ranks, microbatches):
                with pytest.raises(ValueError, match="microbatches"):
                    orders_of(name, ranks, microbatches, per_rank(name))
            else:
                orders = orders_of(name, ranks, microbatches, per_rank(name))
                every = [action for own in orders for action in own]
                assert len(set(every)) == len(every)
                for kinds in ("F", "BI", "BW"):
                    assert sum(action.kind in kinds for action in every) == (
                        ranks * per_rank(name) * microbatches
                    )


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_bubble_is_that_of_the_formula(name):
    for ranks, microbatches in ((2, 4), (3, 3), (4, 8), (4, 16)):
        if why_not(name, ranks, microbatches):
            continue
        found = timeline(orders_of(name, ranks, microbatches, per_rank(name)))
        formula = bubble_by_formula(name, ranks, microbatches, per_rank(name))
        if name == "dualpipe-v":  # half of what its formula gives without overlap
            assert formula is not None and found.bubble < formula
        elif formula is not None:
            assert found.bubble == pytest.approx(formula, abs=1e-12)
    if SCHEDULES[name].name == "zbv":
        assert timeline(orders_of(name, 4, 8, 2)).bubble_inside == pytest.approx(0.0, abs=1e-12)


def test_other_costs_follow_the_formula_where_it_has_them():
    costs = Costs(forward=2.0, input_gradient=3.0, weight_gradient=1.0)
    for name in ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b"):
        found = timeline(orders_of(name, 4, 8, per_rank(name)), costs)
        assert found.bubble == pytest.approx(bubble_by_formula(name, 4, 8, per_rank(name), costs))


def test_what_ranks_hold():
    assert [timeline(orders_of("1f1b", 4, 8, 1)).most_alive(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [timeline(orders_of("gpipe", 4, 8, 1)).most_alive(rank) for rank in range(4)] == [8] * 4
    assert timeline(orders_of("dualpipe-v", 4, 8, 2)).most_alive(0) == 9  # PP + 1 of DeepSeek-V3's table


def test_stages_stand_in_turns_or_as_a_v():
    assert stages_of_ranks("interleaved-1f1b", 2, 3) == [[0, 2, 4], [1, 3, 5]]
    assert stages_of_ranks("zbv", 3, 2) == [[0, 5], [1, 4], [2, 3]]
    assert stages_of_ranks("gpipe", 2, 1) == [[0], [1]]


def test_an_unknown_schedule_is_our_bug():
    with pytest.raises(KeyError):
        orders_of("gpip", 2, 2, 1)
