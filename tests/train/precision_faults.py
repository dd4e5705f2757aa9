"""Mistakes of precision, planted in a rank by replacing the product's functions by name."""
# ruff: noqa: ARG005 - a stand-in has the parameters of what it replaces

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.models import decoder, loss
from fourfold.parallel import data_parallel
from fourfold.parallel.clip import local
from fourfold.parallel.narrow import narrow_all_reduce
from fourfold.train import loop, saving, scaler, setup, step
from fourfold.train.scaler import LossScale, Scaled

put: Callable[[Any, str, Any], None] = setattr


def run_with(fault: str, folder: str, *sets: str) -> str:
    """`precision_jobs.live` with a fault planted for as long as it lasts."""
    global put
    from tests.train.precision_jobs import live

    with pytest.MonkeyPatch.context() as patch:
        put = patch.setattr
        try:
            globals()[fault]()
            return live(folder, *sets)
        finally:
            put = setattr


def _built(change: Any) -> None:
    """Every network is changed after it was built."""
    keep = setup.kit_for

    def kit_for(spec: Any) -> Any:
        kit = keep(spec)
        build = kit.build
        kit.build = lambda seed, dtype: change(build(seed, dtype))
        return kit

    put(setup, "kit_for", kit_for)


def masters_in_bf16() -> None:
    """What AdamW updates is bf16: updates below its spacing are rounded away."""
    _built(lambda network: network.bfloat16())


def frozen_cast_too() -> None:
    """A cast for the forward hits a frozen tensor where it is kept."""

    def change(network: nn.Module) -> nn.Module:
        frozen = next(network.parameters()).requires_grad_(False)
        frozen.data = frozen.data.half()
        return network

    _built(change)


def reduced_in_bf16() -> None:
    """fp32 was asked for, and gradients travel in bf16."""
    keep = data_parallel.DistributedDataParallel

    class Narrow(keep):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.register_comm_hook(dist.group.WORLD, narrow_all_reduce)

    put(data_parallel, "DistributedDataParallel", Narrow)


def norms_in_bf16() -> None:
    """The arithmetic of norms is narrow."""
    keep = nn.RMSNorm.forward
    put(nn.RMSNorm, "forward", lambda self, x: keep(self, x.bfloat16().to(x.dtype)))


def loss_in_bf16() -> None:
    """The loss is summed in the dtype of the logits, which is narrow."""
    keep = loss.cross_entropy

    def cross_entropy(logits: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        total, count = keep(logits, targets, valid)
        return total.bfloat16(), count

    put(decoder, "cross_entropy", cross_entropy)


def count_in_bf16() -> None:
    """Targets are counted in a float of 8 bits."""
    keep = loss.cross_entropy

    def cross_entropy(logits: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        total, count = keep(logits, targets, valid)
        return total, count.bfloat16()

    put(decoder, "cross_entropy", cross_entropy)


def never_unscaled() -> None:
    """The scale stays in the gradients."""
    put(LossScale, "unscale", lambda self, gradients, factor=1.0: None)


def clipped_before_unscaling() -> None:
    """The bound is held against scaled gradients."""
    keep = step.clip
    unscale = LossScale.unscale
    put(LossScale, "unscale", lambda self, gradients, factor=1.0: None)

    def clip(training: Any) -> Tensor:
        norm = keep(training)
        held = [local(p.grad) for p in training.model.parameters() if p.grad is not None]
        unscale(training.scale, held, training.parallel.loss_factor)
        return norm

    put(loop, "clip", clip)


def overflow_ignored() -> None:
    """What is not finite goes into the moments."""
    keep = LossScale.unscale

    def unscale(self: LossScale, gradients: Any, factor: float = 1.0) -> None:
        keep(self, gradients, factor)
        self.skips = False

    put(LossScale, "unscale", unscale)


def skipped_in_silence() -> None:
    """A skipped update stands in no record."""
    keep = LossScale.settle

    def settle(self: LossScale) -> None:
        keep(self)
        self.last = Scaled(self.last.scale, False)

    put(LossScale, "settle", settle)


def decided_alone() -> None:
    """Each rank skips by what it found itself."""
    put(scaler, "sum_floats", lambda found: found)


def scale_not_restored() -> None:
    """A run that goes on begins with the scale of a new one."""
    put(saving, "_restore_scale", lambda *_: None)
