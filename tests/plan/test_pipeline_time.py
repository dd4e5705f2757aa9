from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.pipeline_time import Action, Costs, Slot, Timeline, timeline
from fourfold.spec.errors import CheckFailed


def order(text: str) -> list[Action]:
    """ "0F1 0B1": forward, then backward of microbatch 1 on stage 0."""
    return [Action(int(word[0]), word[1], int(word[2:])) for word in text.split()]


def test_an_action_starts_when_its_rank_is_free_and_what_it_needs_is_there():
    found = timeline([order("0F0 0F1 0B0 0B1"), order("1F0 1B0 1F1 1B1")])
    assert [[(slot.start, slot.end) for slot in own] for own in found.ranks] == [
        [(0, 1), (1, 2), (4, 6), (7, 9)],
        [(1, 2), (2, 4), (4, 5), (5, 7)],
    ]
    assert (found.span, found.busy) == (9, 12)
    assert found.bubble == pytest.approx(1 - 12 / 18)


def test_the_half_for_weights_fills_the_wait():
    found = timeline([order("0F0 0F1 0I0 0W0 0I1 0W1"), order("1F0 1I0 1F1 1I1 1W0 1W1")])
    assert found.span == 7
    assert [slot.end for slot in found.ranks[1]] == [2, 3, 4, 5, 6, 7]
    assert found.ranks[0][2].start == 3  # stage 1's input gradient, not its weight's


def test_costs_and_transfers():
    costs = Costs(forward=2.0, input_gradient=3.0, weight_gradient=5.0, transfer=0.5)
    assert [costs.of(kind) for kind in "FBIW"] == [2.0, 8.0, 3.0, 5.0]
    found = timeline([order("0F0 0B0"), order("1F0 1B0")], costs)
    assert [slot.start for own in found.ranks for slot in own] == [0.0, 13.0, 2.5, 4.5]
    alone = timeline([order("0F0 1F0 1B0 0B0")], costs)
    assert alone.span == 20.0 and alone.bubble == 0.0  # nothing is sent between stages of one rank


def test_what_is_alive_lasts_to_the_gradient_of_weights():
    found = timeline([order("0F0 0I0 0F1 0W0 0I1 0W1")])
    assert found.most_alive(0) == 2
    assert timeline([order("0F0 0B0 0F1 0B1")]).most_alive(0) == 1


def test_the_bubble_inside_is_that_of_the_rank_that_takes_longest():
    action = Action(0, "F", 0)
    found = Timeline(((Slot(action, 0, 4), Slot(action, 6, 8)), (Slot(action, 6, 9),)))
    assert found.bubble_inside == pytest.approx(2 / 8)
    assert found.bubble == pytest.approx(1 - 9 / 18)


def test_ranks_that_wait_for_each_other_are_named():
    with pytest.raises(CheckFailed, match=r"rank 0 waits for ever before B1 of stage 0"):
        timeline([order("0F0 0B1 0F1 0B0"), order("1F0 1F1 1B0 1B1")])


@given(st.integers(1, 5), st.integers(1, 6), st.floats(0.5, 3.0), st.floats(0.5, 3.0))
def test_no_rank_does_two_things_at_once_and_nothing_is_lost(ranks, microbatches, forward, backward):
    orders = [
        [Action(rank, kind, m) for kind in ("F", "B") for m in range(microbatches)] for rank in range(ranks)
    ]
    costs = Costs(forward, backward, backward)
    found = timeline(orders, costs)
    assert [[slot.action for slot in own] for own in found.ranks] == orders
    for own in found.ranks:
        assert all(one.end <= after.start for one, after in pairwise(own))
    assert found.busy == pytest.approx(ranks * microbatches * (forward + 2 * backward))
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))  # GPipe


def test_weights_wait_for_the_input_gradient():
    with pytest.raises(CheckFailed, match=r"rank 0 waits for ever before W0 of stage 0"):
        timeline([order("0F0 0W0 0I0")])
