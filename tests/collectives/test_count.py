"""Collectives are counted where they are asked for: torch's own calls, the functional ones, DTensor's."""

from __future__ import annotations

import pytest

from fourfold.collectives.count import Seen
from tests.collectives import count_jobs

BOTH = (0, 1)


@pytest.mark.parametrize(
    ("job", "found"),
    [
        ("all_reduce", {Seen("all-reduce", BOTH, 24): 2}),
        ("all_gather", {Seen("all-gather", BOTH, 48): 2}),
        ("reduce_scatter", {Seen("reduce-scatter", BOTH, 32): 1}),
        ("all_to_all", {Seen("all-to-all", BOTH, 32): 1}),
        ("broadcast", {Seen("broadcast", BOTH, 24): 1}),
        ("barrier", {Seen("barrier", BOTH, 0): 1}),
        ("functional", {Seen("all-reduce", BOTH, 24): 1, Seen("all-gather", BOTH, 48): 1}),
        ("dtensor", {Seen("all-gather", BOTH, 64): 1}),
        ("backward", {Seen("all-reduce", BOTH, 40): 1}),
        ("nothing", {}),
    ],
)
def test_each_is_seen_once_with_the_bytes_of_the_whole(ranks, job, found):
    assert ranks(2).run(count_jobs.counted, job) == [found, found]


def test_a_send_is_the_senders_and_a_receipt_the_receivers(ranks):
    sender, receiver = ranks(2).run(count_jobs.counted, "send")
    assert sender == {Seen("send", BOTH, 24): 1}
    assert receiver == {Seen("receive", BOTH, 24): 1}


def test_one_may_stand_for_several(ranks):
    assert ranks(2).run(count_jobs.counted, "all_reduce", 5)[0] == {Seen("all-reduce", BOTH, 24): 10}
