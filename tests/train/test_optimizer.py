from __future__ import annotations

import torch
from torch import nn

from fourfold.spec.training import OptimizerSpec
from fourfold.train.optimizer import build_optimizer, decays


def test_only_tensors_of_two_or_more_dims_decay():
    assert decays(nn.Parameter(torch.zeros(2, 2)))
    assert not decays(nn.Parameter(torch.zeros(2)))
    assert not decays(nn.Parameter(torch.zeros(())))


def test_every_trainable_parameter_is_in_exactly_one_group():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(dict(model.named_parameters()), OptimizerSpec(weight_decay=0.3))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_a_model_of_biases_alone_has_one_group():
    optimizer = build_optimizer({"b": nn.Parameter(torch.zeros(2))}, OptimizerSpec())
    assert len(optimizer.param_groups) == 1
