"""What the tests of the global norm run in ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fourfold.parallel.apply import Parallel
from fourfold.parallel.clip import GradientNorm, as_cut, local, scale
from fourfold.spec.training import LayoutSpec
from tests.parallel.one_device import CPU, DECODER, boxed, changed, make_kit, spread


def _with_gradients(layout: dict[str, Any]) -> tuple[list[torch.nn.Parameter], Parallel, float]:
    """A decoder, tied and with biases, each of whose gradients is known; and the norm of all of them."""
    module, parallel = spread(make_kit(DECODER), LayoutSpec(**{"dp_replicate": 1} | layout), meta=True)
    total = 0.0
    for number, (_, parameter) in enumerate(module.module.named_parameters()):
        whole = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape).cos() * (
            number + 1
        )
        total += float(whole.square().sum())
        parameter.grad = as_cut(boxed(whole, parameter).clone(), parameter)
    return list(module.module.parameters()), parallel, total**0.5


def norm_of_known(layout: dict[str, Any]) -> tuple[float, float]:
    parameters, parallel, expected = _with_gradients(layout)
    return float(parallel.norm(parameters, CPU)), expected


def norm_counting_all(layout: dict[str, Any]) -> tuple[float, float]:
    """The same where every rank's gradient counts."""
    with changed(GradientNorm, "_counts", lambda *_: True):
        return norm_of_known(layout)


def norm_with(layout: dict[str, Any], value: float) -> float:
    """The norm where the last rank's own part of one cut gradient holds `value`."""
    parameters, parallel, _ = _with_gradients(layout)
    if dist.get_rank() == dist.get_world_size() - 1:
        cut = next(p for p in parameters if 0 < local(p).numel() < p.numel())
        assert cut.grad is not None
        local(cut.grad).view(-1)[0] = value
    return float(parallel.norm(parameters, CPU))


def scaled(layout: dict[str, Any]) -> bool:
    """Whether each gradient is half of what it was, in the same memory."""
    parameters, _, _ = _with_gradients(layout)
    before = [(local(p.grad).data_ptr(), local(p.grad).clone()) for p in parameters if p.grad is not None]
    scale(parameters, torch.tensor(0.5))
    after = [local(p.grad) for p in parameters if p.grad is not None]
    return all(
        now.data_ptr() == at and torch.equal(now, was * 0.5)
        for now, (at, was) in zip(after, before, strict=True)
    )
