"""A mixture of experts against its definition, written token by token, in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.models.carried import LossWeight, carried, loss_elsewhere, noted
from fourfold.models.decoder import DecoderKit, Mixture
from fourfold.models.initial import fill
from fourfold.models.mixture import Routed
from fourfold.models.routing import Rows, capacities, chosen_experts, counted, fitting
from fourfold.spec.errors import CheckFailed
from fourfold.spec.model import DecoderSpec, MoeSpec
from tests.parallel.one_device import part

BASE: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "vocabulary": 19, "init_std": 0.4}
MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "expert_width": 5}
VALID = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)


def spec_of(moe: dict[str, Any], **more: Any) -> DecoderSpec:
    return DecoderSpec.model_validate(BASE | more | {"moe": MOE | moe})


def made(moe: dict[str, Any], **more: Any) -> Routed:
    spec = spec_of(moe, **more)
    assert spec.moe is not None
    routed = Routed(spec, spec.moe)
    fill(routed, DecoderKit(spec).start, 7, torch.float64)
    with torch.no_grad():
        for parameter in routed.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return routed


def rows_of(valid: Tensor) -> Rows:
    live = torch.tensor([[bool(row[at:].any()) for at in range(valid.shape[1])] for row in valid])
    return Rows(live, valid.sum(1), None, LossWeight())


def one_expert(routed: Routed, expert: int, x: Tensor) -> Tensor:
    held = dict(routed.experts.named_parameters())

    def linear(name: str, y: Tensor) -> Tensor:
        bias = held.get(f"{name}_bias")
        return held[name][expert] @ y + (0 if bias is None else bias[expert])

    up = linear("up", x)
    hidden = F.gelu(up, approximate="tanh") if "gate" not in held else F.silu(linear("gate", x)) * up
    return linear("down", hidden)


def by_definition(routed: Routed, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, list[list[list[int]]]]:
    """Outputs, the auxiliary loss as a sum over rows, and the choices of each live token."""
    moe, outputs, loss, choices = routed.moe, torch.zeros_like(x), torch.zeros((), dtype=x.dtype), []
    for row in range(len(x)):
        live = max((at + 1 for at in range(x.shape[1]) if valid[row, at]), default=0)
        logits = x[row, :live] @ routed.router.T
        scores = logits.softmax(-1) if moe.router == "softmax" else 1 / (1 + (-logits).exp())
        ranked = scores.detach() + (0 if routed.correction is None else routed.correction)
        chosen = [
            sorted(range(moe.experts), key=lambda e, t=t: -float(ranked[t, e]))[: moe.top_k]
            for t in range(live)
        ]
        room = (
            [math.ceil((moe.capacity_factor or math.inf) * moe.top_k * live / moe.experts)] * moe.experts
            if (moe.capacity_factor)
            else [live] * moe.experts
        )
        for k in range(moe.top_k):
            for t in range(live):
                expert = chosen[t][k]
                if room[expert] == 0:
                    continue
                room[expert] -= 1
                weight = scores[t, expert]
                if moe.top_k > 1:
                    weight = weight / sum(scores[t, e] for e in chosen[t])
                outputs[row, t] = outputs[row, t] + weight * one_expert(routed, expert, x[row, t])
        if live:
            shares = scores / scores.sum(-1, keepdim=True)
            for expert in range(moe.experts):
                often = sum(expert in of_token for of_token in chosen) * moe.experts / (moe.top_k * live)
                loss = loss + int(valid[row].sum()) * often * shares[:, expert].mean()
        choices.append(chosen)
    return outputs, loss, choices


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"router": "sigmoid"}, {"biases": True}),
    ({"top_k": 1, "balance_weight": 0.3}, {"ffn": "gelu", "biases": True}),
    ({"capacity_factor": 0.6}, {}),
    ({"capacity_factor": 1.0, "top_k": 3, "router": "sigmoid"}, {}),
    ({"balance": "bias", "router": "sigmoid"}, {}),
    ({"balance": "none", "experts": 1, "top_k": 1}, {}),
]


@pytest.mark.parametrize(("moe", "more"), SETTINGS)
def test_outputs_and_every_gradient_are_those_of_the_definition(moe, more):
    routed, factor = made(moe, **more), 0.37
    if routed.correction is not None:
        routed.correction.copy_(torch.tensor([0.5, -0.4, 0.0, 0.1]))
    x = torch.randn(*VALID.shape, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    of_output = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = []
    for which in (0, 1):
        given = x.clone().requires_grad_()
        routed.zero_grad()
        if which:
            y, auxiliary, choices = by_definition(routed, given, VALID)
            weight = (0.01 if routed.moe.balance_weight is None else routed.moe.balance_weight) * (
                routed.moe.balance == "loss"
            )
            ((y * of_output).sum() * factor + factor * weight * auxiliary).backward()
        else:
            rows = rows_of(VALID)
            y = routed(given, rows)
            (noted((y * of_output).sum(), rows.weight) * factor).backward()
        gradients = {name: p.grad for name, p in routed.named_parameters()}
        found.append((y.detach(), given.grad, gradients))
    (y, of_x, of_each), (y_, of_x_, of_each_) = found
    torch.testing.assert_close(y, y_, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_x, of_x_, rtol=1e-12, atol=1e-12)
    for name, gradient in of_each.items():
        expected = of_each_[name]
        assert gradient is not None and (expected is not None or not gradient.any()), name
        if expected is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12, msg=name)
    if routed.moe.balance == "bias":
        load = [sum(t.count(e) for of_row in choices for t in of_row) for e in range(4)]
        assert routed.load is not None and routed.load.tolist() == load
        before = routed.correction.clone()
        routed.rebalance(routed.load)
        mean = sum(load) / 4
        signs = [(n < mean) - (n > mean) for n in load]
        assert torch.equal(routed.correction, before + 0.001 * torch.tensor(signs, dtype=torch.float64))


def test_dead_tokens_reach_no_expert_and_change_nothing():
    routed = made({"capacity_factor": 0.8})
    x = torch.randn(*VALID.shape, 8, dtype=torch.float64)
    y = routed(x, rows_of(VALID))
    other = x.clone()
    other[0, 4:], other[2] = 100.0, -50.0
    z = routed(other, rows_of(VALID))
    assert torch.equal(y, z)
    assert not y[0, 4:].any() and not y[2].any() and y[0, :4].any()


def test_the_loss_that_is_told_is_the_cross_entropy_and_its_gradient_has_both():
    """B065: with the main loss's gradient masked, the router's is weight × d(auxiliary)."""
    told, gradients = [], []
    for weight in (0.0, 0.5):
        kit = DecoderKit(spec_of({"balance_weight": weight}))
        model = kit.build(3, torch.float64)
        total, _ = kit.loss(model, part(kit, 0, 0, 6, False))
        total.backward()
        told.append(total.detach())
        gradients.append(model.get_parameter("blocks.0.ffn.routed.router").grad)
    assert torch.equal(told[0], told[1])
    assert float((gradients[1] - gradients[0]).abs().max()) > 1e-3


def test_a_loss_that_is_elsewhere_says_its_factor():
    """Asked for in backward, once; what is made after the forward of that stage knows nothing of it."""
    asked = []
    with loss_elsewhere(lambda: asked.append(True) or 0.25):
        weight = LossWeight()
    x = torch.ones(2, requires_grad=True)
    auxiliary = (3 * x).sum()
    y = carried(carried(x * 2, auxiliary, weight, lambda: None), auxiliary, weight, lambda: None)
    assert not asked
    y.sum().backward()
    assert asked == [True] and torch.equal(x.grad, torch.full((2,), 2 + 2 * 3 * 0.25))
    with pytest.raises(CheckFailed):
        LossWeight().at(x)


def test_an_auxiliary_loss_without_its_loss_is_refused():
    weight = LossWeight()
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    auxiliary = (x * x).sum()
    with pytest.raises(CheckFailed, match="found: a backward that does not come from the loss"):
        carried(x * 2, auxiliary, weight, lambda: None).sum().backward()


def test_the_first_of_equal_scores_is_chosen_and_weights_sum_to_one():
    moe = MoeSpec(experts=3, top_k=2)
    scores, chosen, weights = chosen_experts(torch.zeros(1, 2, 3, dtype=torch.float64), moe, None)
    assert chosen.tolist() == [[[0, 1], [0, 1]]]
    assert torch.equal(weights, torch.full((1, 2, 2), 0.5, dtype=torch.float64))
    assert scores.shape == (1, 2, 3)


def test_first_choices_come_before_second_ones_and_earlier_tokens_before_later():
    chosen = torch.tensor([[[0, 1], [1, 0], [0, 1], [0, 2]]])
    live = torch.tensor([[True, True, True, False]])
    moe = MoeSpec(experts=3, top_k=2, capacity_factor=0.5)
    assert capacities(live.sum(1), moe).tolist() == [1]
    assert fitting(chosen, live, torch.tensor([2]), 3).tolist() == [
        [[True, True], [True, False], [True, False], [False, False]]
    ]
    assert counted(chosen, live, 3).tolist() == [[3, 3, 0]]


def test_nothing_is_counted_in_a_forward_without_a_backward():
    routed = made({"balance": "bias"})
    with torch.no_grad():
        routed(torch.ones(3, 6, 8, dtype=torch.float64), rows_of(VALID))
    assert routed.load is None


def test_leading_layers_are_dense_and_dropout_is_drawn_once():
    model = DecoderKit(spec_of({"first_dense_layers": 1, "shared_experts": 2}, dropout=0.1)).build(
        0, torch.float32
    )
    kinds = [type(block.ffn).__name__ for block in model.blocks]
    assert kinds == ["FeedForward", "Mixture"]
    mixture = model.blocks[1].ffn
    assert isinstance(mixture, Mixture) and mixture.shared is not None
    assert (mixture.dropout, mixture.shared.dropout) == (0.1, 0.0)
    assert mixture.shared.up.weight.shape == (10, 8)


def test_a_skeleton_has_the_values_of_corrections():
    kit = DecoderKit(spec_of({"balance": "bias"}))
    skeleton = kit.skeleton(torch.float64)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    corrections = dict(skeleton.named_buffers())
    assert list(corrections) == [f"blocks.{n}.ffn.routed.correction" for n in range(2)]
    assert all(not c.is_meta and c.dtype == torch.float64 and not c.any() for c in corrections.values())


def test_bf16_routes_as_fp32_does():
    routed = made({}).float()
    x = torch.randn(*VALID.shape, 8)
    y = routed(x, None).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = routed(x, None).detach()
    assert narrow.dtype == torch.bfloat16
    assert float((y - narrow).abs().max()) < 0.05 * float(y.abs().max())
