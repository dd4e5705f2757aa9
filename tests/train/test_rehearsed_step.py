"""Who is met in a collective, by the names of axes."""

from __future__ import annotations

import pytest

from fourfold.spec.grid import Grid
from fourfold.train.rehearsed_step import _axis

GRID = Grid(pp=4, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((0, 1), "tp"),
        ((0, 2), "cp"),
        ((0, 16, 32, 48), "pp"),
        ((0, 48), "both ends of pp"),
        ((0, 2, 8, 10), "dp_replicate × cp"),
        ((0, 4, 8, 12), "dp"),
        ((0, 2, 4, 6), "fsdp"),
        ((0, 1, 2, 3), "ep"),
        (tuple(range(16)), "dp_replicate × dp_shard × cp × tp"),
        (tuple(range(64)), "world"),
        ((0, 3), "a group of the model's own"),
    ],
)
def test_a_group_is_named_by_what_its_ranks_differ_in(ranks, name):
    assert _axis(ranks, GRID, 0) == name
