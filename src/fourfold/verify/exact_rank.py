"""What each rank does in a check of exact mode: the trainer's own steps, and a hash of every value of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.collectives.sums import sum_exactly
from fourfold.spec.spec import Spec
from fourfold.train import loop as train_loop
from fourfold.train import setup as train_setup
from fourfold.train import step as train_step
from fourfold.train.state import tensors_of
from fourfold.verify.here import joined_here


@dataclass(frozen=True, slots=True)
class StepBits:
    """One step: loss and norm as hexadecimal floats; SHA-256 of each gradient before clipping, by name."""

    loss: str
    gradients: Mapping[str, str]
    norm: str
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RunBits:
    """Some steps; and of every tensor of the state after the last, but the ranks' own streams, by name."""

    steps: tuple[StepBits, ...]
    state: Mapping[str, str]


def train_exactly(spec: Spec, steps: int) -> RunBits | None:
    """Train the first `steps` steps of a settled Spec, after the warm-up a run begins with; rank 0 tells.

    Collectives: those of the trainer's step, and one all-gather for each tensor that is cut.
    Raises what the trainer raises.
    """
    told = []
    with train_setup.open_training(spec, joined_here()) as training:
        train_loop.warm_up(training)
        for step, batches in enumerate(training.loader.steps(0, steps)):
            pending = train_step.agree_totals(training, batches, False)
            pair, totals = train_step.accumulate(training, batches, pending)
            named = training.named_parameters()
            gradients = {name: _bits(p.grad) for name, p in named.items() if p.grad is not None}
            norm = train_step.clip(training)
            train_step.update(training, step)
            assert pair.each is not None, "run.exact = true"
            (total,) = sum_exactly([pair.each.tolist()])
            loss = (total / max(totals.count, 1)).hex()
            parameters = {name: _bits(p) for name, p in named.items()}
            told.append(StepBits(loss, gradients, float(norm).hex(), parameters))
        state = {
            name: _bits(tensor)
            for name, tensor in tensors_of(training).items()
            if not name.startswith("rank")
        }
    return RunBits(tuple(told), state) if dist.get_rank() == 0 else None


@torch.no_grad()
def _bits(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(
        whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()
