"""The global norm over any mix of cuts: each element once, the same on every rank, and as one device has it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from fourfold.parallel.clip import GradientNorm, as_cut, local, scale
from fourfold.spec.grid import Grid
from tests.parallel import norm_jobs

MIXES = [
    {"tp": 4},
    {"tp": 2, "dp_replicate": 2},
    {"dp_shard": 4, "zero": 3},
    {"dp_shard": 2, "zero": 2, "tp": 2},
    {"dp_shard": 2, "dp_replicate": 2, "zero": 1},
]


@pytest.mark.parametrize("layout", MIXES)
def test_replicated_and_tied_gradients_count_once(ranks, layout):
    told = ranks(4).run(norm_jobs.norm_of_known, layout)
    assert {norm for norm, _ in told} == {told[0][0]}, "not the same bits on every rank"
    for norm, expected in told:
        assert norm == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("layout", MIXES)
def test_one_part_that_is_not_finite_makes_every_norm_so(ranks, layout):
    for value in (math.nan, math.inf):
        told = ranks(4).run(norm_jobs.norm_with, layout, value)
        assert not any(math.isfinite(norm) for norm in told)


@pytest.mark.parametrize("layout", MIXES[:4])
def test_a_norm_of_local_parts_alone_would_be_seen(ranks, layout):
    """The measure of this file: the sum over ranks of all that each holds counts some elements twice."""
    told = ranks(4).run(norm_jobs.norm_counting_all, layout)
    replicated = "tp" in layout  # norms and biases; under ZeRO alone everything is cut
    assert all((abs(norm / expected - 1) > 1e-3) is replicated for norm, expected in told)


def test_scaling_reaches_what_is_held_in_place(ranks):
    assert all(ranks(4).run(norm_jobs.scaled, MIXES[3]))


def test_alone_it_is_the_plain_norm_without_any_group():
    parameters = [Parameter(torch.ones(2, 3)), Parameter(torch.ones(5)), Parameter(torch.ones(7))]
    norm = GradientNorm(Grid(), 0)
    assert float(norm(parameters, torch.device("cpu"))) == 0.0
    parameters[0].grad = torch.full((2, 3), 3.0)
    parameters[1].grad = torch.full((5,), 2.0)
    found = norm(parameters, torch.device("cpu"))
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(math.sqrt(6 * 9 + 5 * 4))
    scale(parameters, torch.tensor(0.5))
    assert torch.equal(parameters[0].grad, torch.full((2, 3), 1.5))
    assert parameters[2].grad is None
    scale(parameters[2:], torch.tensor(0.5))


def test_a_plain_tensor_is_held_as_it_is():
    x = torch.ones(3, requires_grad=True)
    assert local(x).data_ptr() == x.data_ptr()
    assert not local(x).requires_grad
    assert as_cut(x, torch.ones(3)) is x
