"""Gradients of microbatches in the order of the tree, absent ones too; and their norm by rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fourfold.parallel.exact_norm import exact_norm, halved
from fourfold.parallel.leaves import Leaves, Turns
from fourfold.spec.errors import CheckFailed


def summed(gradients):
    """By `Leaves`, one parameter."""
    leaves = Leaves()
    leaves.begin(len(gradients))
    for at, gradient in enumerate(gradients):
        leaves.next()
        found = leaves.take(7, None if gradient is None else torch.tensor([gradient]))
        assert leaves.last == (at + 1 == len(gradients))
        assert leaves.last or found is None
    assert not list(leaves.held())
    return found


def test_pairs_come_first():
    big = 2.0**24  # of fp32: 1 more is lost
    assert summed([big, 1.0, 1.0, -big]) == 1.0  # one by one it would be 0
    assert summed([1.0, 1.0, big, -big]) == 2.0
    assert summed([3.0]) == 3.0


def test_no_gradient_is_zeros_where_another_microbatch_has_one():
    assert summed([None, None, None]) is None
    assert summed([None, 2.0, None, 3.0]) == 5.0
    assert math.copysign(1, summed([None, -0.0])) == 1.0  # as 0.0 + -0.0 is
    assert math.copysign(1, summed([-0.0, -0.0])) == -1.0


def test_who_comes_for_the_first_time_in_a_later_microbatch_has_its_place():
    leaves = Leaves()
    leaves.begin(4)
    leaves.next()
    leaves.next()
    leaves.next()
    assert leaves.take(1, torch.ones(1)) is None
    leaves.next()
    assert leaves.take(1, torch.ones(1)) == 2.0


def test_two_gradients_in_one_microbatch_are_refused():
    leaves = Leaves()
    leaves.begin(2)
    leaves.next()
    leaves.take(1, torch.ones(1))
    with pytest.raises(CheckFailed, match="came in two parts"):
        leaves.take(1, torch.ones(1))


def test_what_is_held_is_seen():
    leaves = Leaves()
    leaves.begin(8)
    held = []
    for _ in range(8):
        leaves.next()
        leaves.take(1, torch.ones(5))
        held.append(sum(each.numel() for each in leaves.held()))
    assert held == [5, 5, 10, 5, 10, 10, 15, 0]


class Branches(nn.Module):
    """One of two parameters, as it is told."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, which, value):
        return (getattr(self, which) * value).sum()


def test_turns_of_parameters_that_take_part_sometimes():
    module, leaves = Branches(), Leaves()
    turns = Turns(module, leaves)
    leaves.begin(3)
    for which, value in (("a", 1.0), ("b", 2.0), ("a", 4.0)):
        with turns.microbatch():
            module(which, value).backward()
    assert torch.equal(module.a.grad, torch.full((2,), 5.0))
    assert module.b.grad is None
    turns.settle()
    assert torch.equal(module.b.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (5, 1000), (3, 0), (0, 3), (2, 64)])
def test_rows_have_the_same_bits_alone_and_together(shape):
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = halved(values.clone())
    alone = [halved(row[None].clone()) for row in values]
    assert together.shape == shape[:1]
    assert torch.equal(together, torch.cat(alone) if alone else together)
    torch.testing.assert_close(together, values.sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_leaves_gradients_alone(dtype):
    parameter = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
    parameter.grad = torch.ones(3, 5, dtype=dtype) * 2
    exact_norm([parameter], torch.device("cpu"), speaks=True)
    assert torch.equal(parameter.grad, torch.full((3, 5), 2.0, dtype=dtype))


def test_the_norm_is_that_of_all_gradients():
    draws = torch.Generator().manual_seed(2)
    parameters = [nn.Parameter(torch.zeros(s)) for s in ((3, 5), (4,), (), (2, 3, 4), (6, 1))]
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=draws)
    every = torch.cat([p.grad.reshape(-1) for p in parameters[:-1]]).double()
    found = exact_norm(parameters, torch.device("cpu"), speaks=True)
    torch.testing.assert_close(found, every.norm(), rtol=1e-14, atol=0)
    assert exact_norm(parameters[-1:], torch.device("cpu"), speaks=True) == 0.0
    parameters[0].grad[1, 1] = float("nan")
    assert exact_norm(parameters, torch.device("cpu"), speaks=True).isnan()
