"""One optimizer step, in parts: agree on the totals, accumulate gradients, clip, update.

The loss is a pair (sum over valid targets, count of them). Its denominator is the count over all ranks and all
microbatches of the step, known before the first backward, so that no cut of the global batch changes a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.collectives.sums import PendingSum, start_sum
from fourfold.data.batch import Batch
from fourfold.train.precision import autocast
from fourfold.train.schedule import learning_rate
from fourfold.train.setup import Training


@dataclass(frozen=True, slots=True)
class Totals:
    """What all ranks know of a step before its first backward.

    count: valid targets. stop, save: a rank wishes the run to end, or its state to be saved, after this step.
    """

    count: int
    stop: bool
    save: bool = False


@dataclass(slots=True)
class PendingTotals:
    """Totals under way."""

    _sum: PendingSum

    def wait(self) -> Totals:
        count, stop, save = self._sum.wait()
        return Totals(count, stop > 0, save > 0)


@dataclass(frozen=True, slots=True)
class LossPair:
    """This rank's share of the loss: fp64 sum over its valid targets, and their count; on the device, not read."""

    sum: Tensor
    count: Tensor


def agree_totals(
    batches: Sequence[Batch], stop_requested: bool, save_requested: bool = False
) -> PendingTotals:
    """Start summing the step's valid targets, and the wishes to stop and to save, over ranks.

    Collectives: one all-reduce of three integers on the CPU, asynchronous: it runs beside the first forward.
    """
    count = sum(batch.valid_count() for batch in batches)
    return PendingTotals(start_sum([count, int(stop_requested), int(save_requested)]))


def accumulate(
    training: Training, batches: Sequence[Batch], pending: PendingTotals
) -> tuple[LossPair, Totals]:
    """Forward and backward of every microbatch of the step.

    Afterwards each parameter's gradient is that of (global sum / global count), on every rank.
    Collectives: the gradient reduction of `parallel`, in the last microbatch only.
    Raises CheckFailed if a gradient was left unreduced.
    """
    parallel, spec = training.parallel, training.spec
    float_dtype = training.dtype if training.dtype is torch.float64 else None
    sums, counts = [], []
    totals: Totals | None = None
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        training.beat(batch.step + 1, "forward")
        with parallel.syncing(last), autocast(spec.precision, training.device):
            loss_sum, count = parallel.module(batch.to(training.device, float_dtype))
        if totals is None:
            totals = pending.wait()
        training.beat(batch.step + 1, "backward")
        # Data parallel averages over `degree` ranks where the global mean asks for the sum.
        (loss_sum * (parallel.degree / max(totals.count, 1))).backward()
        sums.append(loss_sum.detach().double())
        counts.append(count)
    assert totals is not None, "a step has at least one microbatch"
    parallel.check_reduced()
    return LossPair(torch.stack(sums).sum(), torch.stack(counts).sum()), totals


@torch.no_grad()
def clip(training: Training) -> Tensor:
    """Global L2 norm of all gradients; scales them in place to `optimizer.clip_norm` if they exceed it.

    Returns the norm before clipping (0-dim, fp32 or wider, on the device, not read).
    The factor is min(1, clip_norm / norm), without the 1e-6 torch adds, so that it equals the textbook's
    (Pascanu et al., arXiv 1211.5063, algorithm 1).
    """
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=training.device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if training.spec.optimizer.clip_norm > 0:
        # A norm of 0 gives inf, clamped to 1 as well.
        torch._foreach_mul_(gradients, torch.clamp(training.spec.optimizer.clip_norm / norm, max=1.0))
    return norm


def update(training: Training, step: int) -> float:
    """AdamW with the learning rate of `step` (from 0); gradients are dropped afterwards. Returns the rate."""
    training.beat(step + 1, "update")
    rate = learning_rate(training.spec.optimizer, training.spec.run.steps, step)
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    training.optimizer.step()
    # None, not zero: a parameter that takes no part in a step has no gradient and is not moved.
    training.optimizer.zero_grad(set_to_none=True)
    return rate
