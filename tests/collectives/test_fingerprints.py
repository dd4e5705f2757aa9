from __future__ import annotations

import pytest

from tests.collectives import fingerprints_jobs as jobs

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("by_helper", [False, True])
def test_a_swap_of_one_shape_is_found_at_the_next_look_on_every_rank(ranks, by_helper):
    for told in ranks(3).run(jobs.swapped, 2, by_helper):
        assert (
            "one collective on every rank of group 0, as its call 3, since the last look before step 2"
            in told
        )
        assert "rank 2 called all_reduce of [3] float32" in told and "rank 0, 1 called" in told
        assert told.count("fingerprints_jobs:") >= 2


def test_units_of_fsdp2_in_another_order_are_found_by_their_names(ranks):
    for told in ranks(2).run(jobs.units_swapped, 1):
        assert "rank 1 called all_gather_single" in told
        assert "(1) at" in told and "(0) at" in told  # the blocks' names in the Sequential


def test_no_rank_swaps_nothing_is_found(ranks):
    assert set(ranks(2).run(jobs.swapped, 5, True)) == {""}
    assert set(ranks(2).run(jobs.units_swapped, 5)) == {""}


def test_collectives_of_every_sort_are_noted_and_what_may_differ_is_let_be(ranks):
    found = ranks(3).run(jobs.of_every_sort)
    assert all(names == ["all_reduce", "barrier"] for _, names in found)
    counts = [count for count, _ in found]
    assert counts[0] == counts[1] == counts[2] + 1  # the message
