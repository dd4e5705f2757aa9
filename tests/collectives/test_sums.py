from __future__ import annotations

import math

import torch

from fourfold.collectives.sums import start_sum, sum_floats
from tests.collectives import rank_jobs


def test_a_world_of_one_is_the_identity():
    assert start_sum([3, 4]).wait() == [3, 4]
    assert sum_floats(torch.tensor([1.5], dtype=torch.float64)).tolist() == [1.5]
    assert start_sum([]).wait() == []


def test_sums_over_real_ranks_are_exact_and_leave_the_input_alone(ranks):
    for rank, (whole, total, mine) in enumerate(ranks(2).run(rank_jobs.sum_of_ranks)):
        assert whole == [3, 2**41 + 1]
        assert total[0] == 2.0
        assert math.isnan(total[1])
        assert mine[0] == 0.5 + rank
