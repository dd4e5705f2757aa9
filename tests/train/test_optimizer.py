from __future__ import annotations

import pytest
import torch
from torch import nn

from fourfold.spec.training import OptimizerSpec
from fourfold.train.optimizer import Optimizer, decays


def test_only_tensors_of_two_or_more_dims_decay():
    assert decays("up.weight", nn.Parameter(torch.zeros(2, 2)))
    assert not decays("norm.weight", nn.Parameter(torch.zeros(2)))
    assert not decays("scale", nn.Parameter(torch.zeros(())))
    assert not decays("experts.up_bias", nn.Parameter(torch.zeros(4, 2)))  # a stack of biases


def test_every_trainable_parameter_is_in_exactly_one_group():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model[2].weight.requires_grad_(False)
    optimizer = Optimizer(dict(model.named_parameters()), OptimizerSpec(weight_decay=0.3))
    held = [id(p) for group in optimizer.adamw.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert [group["weight_decay"] for group in optimizer.adamw.param_groups] == [0.3, 0.0]


def test_a_model_of_biases_alone_has_one_group():
    optimizer = Optimizer({"b": nn.Parameter(torch.zeros(2))}, OptimizerSpec())
    assert len(optimizer.adamw.param_groups) == 1


def test_one_step_is_that_of_the_spec():
    weight, bias = nn.Parameter(torch.tensor([[2.0]])), nn.Parameter(torch.tensor([2.0]))
    spec = OptimizerSpec(lr=0.1, betas=(0.5, 0.75), eps=1.0, weight_decay=0.3)
    optimizer = Optimizer({"weight": weight, "bias": bias}, spec)
    for gradient in (1.0, 3.0):
        weight.grad, bias.grad = torch.full((1, 1), gradient), torch.full((1,), gradient)
        optimizer.step({"weight": weight, "bias": bias}, 0.1)
    # By hand: m and v, corrected, are 1 and 1, then (0.25 + 1.5) / 0.75 and (0.1875 + 2.25) / 0.4375.
    steps = (0.1 * 1 / (1 + 1), 0.1 * (1.75 / 0.75) / ((2.4375 / 0.4375) ** 0.5 + 1))
    kept = 1 - 0.1 * 0.3
    assert bias.item() == pytest.approx(2 - sum(steps), rel=1e-6)
    assert weight.item() == pytest.approx((2 * kept - steps[0]) * kept - steps[1], rel=1e-6)
