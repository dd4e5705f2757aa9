from __future__ import annotations

import pytest
import torch
from torch import nn

from fourfold.parallel.data_parallel import mixes_rows
from tests.parallel import rank_jobs


def one_device(used: list[list[bool]]) -> dict[str, list[float] | None]:
    """The mean over ranks of the sums of their microbatches, on one device."""
    model = rank_jobs.Branching()
    for rank, micros in enumerate(used):
        for micro, both in enumerate(micros):
            (model(rank_jobs.inputs(rank, micro), both)[0] / len(used)).backward()
    return {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in model.named_parameters()}


def same(actual: dict[str, list[float] | None], expected: dict[str, list[float] | None]) -> bool:
    return all(
        (actual[name] is None) == (want is None)
        and (
            want is None or torch.allclose(torch.tensor(actual[name]), torch.tensor(want), rtol=1e-12, atol=0)
        )
        for name, want in expected.items()
    )


@pytest.mark.parametrize("micros", [1, 3])
def test_gradients_are_the_mean_over_ranks_and_microbatches(ranks, micros):
    used = [[True] * micros] * 2
    for actual in ranks(2).run(rank_jobs.gradients, used):
        assert same(actual, one_device(used))


@pytest.mark.parametrize(
    "used",
    [
        [[True], [False]],  # on one rank only
        [[True, False], [False, False]],  # in an earlier microbatch of one rank only
        [[False], [False]],  # nowhere: no gradient, not zeros
    ],
)
def test_parameters_used_sometimes_are_right_where_the_layout_says_so(ranks, used):
    for actual in ranks(2).run(rank_jobs.gradients, used, True):
        assert same(actual, one_device(used))


def test_a_parameter_that_took_no_part_is_refused_by_name(ranks):
    told = ranks(2).run(rank_jobs.refusal, [False, False])
    assert all("second.weight" in text and "layout.unused_parameters=true" in text for text in told)


def test_a_world_of_one_is_left_as_it_is():
    assert rank_jobs.spread_alone() == (1, 0, True)


def test_layers_that_mix_rows_are_named_while_they_train():
    model = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2))
    )
    assert mixes_rows(model) == ("1", "2.0")
    assert mixes_rows(nn.SyncBatchNorm(2)) == ("",)
    assert mixes_rows(model.eval()) == ()
    assert mixes_rows(nn.Linear(2, 2)) == ()
