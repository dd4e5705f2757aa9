"""One optimizer step, in parts: agree on the totals, accumulate gradients, clip, update.

In fp16 the loss is scaled before backward, and gradients are unscaled at the end of `accumulate`, so before anything
looks at them; where one is not finite on any rank, no rank updates.

The loss is a pair (sum over valid targets, count of them). Its denominator is the count over all ranks and all
microbatches of the step, known before the first backward, so that no cut of the global batch changes a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.collectives.sums import PendingSum, start_sum
from fourfold.data.batch import Batch
from fourfold.parallel.clip import local, scale
from fourfold.train.precision import autocast, check_loss
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
    """This rank's share of the loss: fp64 sum over its valid targets, and their count; on the device, not read.

    each: in exact mode, that of each microbatch, fp64 [accumulation].
    """

    sum: Tensor
    count: Tensor
    each: Tensor | None = None


def agree_totals(
    training: Training, batches: Sequence[Batch], stop_requested: bool, save_requested: bool = False
) -> PendingTotals:
    """Start summing the step's valid targets, and the wishes to stop and to save, over ranks.

    Collectives: one all-reduce of three integers on the CPU, asynchronous: it runs beside the first forward.
    """
    count = sum(batch.valid_count() for batch in batches) if training.parallel.counts else 0
    return PendingTotals(start_sum([count, int(stop_requested), int(save_requested)]))


def accumulate(
    training: Training, batches: Sequence[Batch], pending: PendingTotals
) -> tuple[LossPair, Totals]:
    """Forward and backward of every microbatch of the step.

    Afterwards each parameter's gradient is that of (global sum / global count), on every rank; what fp16 scaled is
    unscaled, and `training.scale.skips` says whether any rank has a gradient that is not finite.
    Collectives: the gradient reduction of `parallel`, in the last microbatch only; that of `LossScale.unscale`.
    Raises CheckFailed if a gradient was left unreduced, or the model summed its loss in a narrow dtype.
    """
    parallel, spec = training.parallel, training.spec
    float_dtype = training.dtype if training.dtype is torch.float64 else None
    # Under loss scaling it comes after backward: a scale means the same range on every layout.
    weight, after = (1, parallel.loss_factor) if training.scale.dynamic else (parallel.loss_factor, 1)
    step = batches[0].step + 1
    totals: Totals | None = None
    parallel.balance.begin()

    @contextmanager
    def around(number: int) -> Iterator[None]:
        if number == 1 and parallel.pipeline is None:
            training.between()
        training.beat(step, "forward")
        with autocast(spec.precision, training.device):
            yield

    def factor() -> float:
        nonlocal totals
        if totals is None:
            totals = pending.wait()
        training.beat(step, "backward")
        return weight * training.scale.value / max(totals.count, 1)

    def weighed(loss_sum: Tensor) -> Tensor:
        of_loss = factor()
        check_loss(loss_sum)
        return loss_sum * of_loss

    moved = [batch.to(training.device, float_dtype) for batch in batches]
    pairs = parallel.run(moved, weighed, factor, around)
    assert totals is not None, "there is a backward on every rank"
    if training.scale.dynamic:
        held = [local(p.grad) for p in training.model.parameters() if p.grad is not None]
        training.scale.unscale(held, after)
    sums, counts = zip(*pairs, strict=True)
    each = torch.stack([one.double() for one in sums])
    pair = LossPair(each.sum(), torch.stack(counts).sum(), None if parallel.leaves is None else each)
    return pair, totals


@torch.no_grad()
def clip(training: Training) -> Tensor:
    """Global L2 norm of all gradients; scales them in place to `optimizer.clip_norm` if they exceed it.

    Returns the norm before clipping (0-dim, fp32 or wider, on the device, not read).
    The factor is min(1, clip_norm / norm), without the 1e-6 torch adds, so that it equals the textbook's
    (Pascanu et al., arXiv 1211.5063, algorithm 1).
    """
    parameters = list(training.model.parameters())
    norm = training.parallel.norm(parameters, training.device)
    bound = training.spec.optimizer.clip_norm
    if bound > 0:
        scale(parameters, torch.clamp(bound / norm, max=1.0))  # a norm of 0 gives inf, clamped to 1 as well
    return norm


def update(training: Training, step: int) -> float:
    """AdamW with the learning rate of `step` (from 0); gradients are dropped afterwards. Returns the rate.

    A step that skips changes no parameter, moment, count or router's correction, and does not decay; the schedule goes
    on by step. Collectives: those of `parallel.balance`.
    """
    training.beat(step + 1, "update")
    rate = learning_rate(training.spec.optimizer, training.spec.run.steps, step)
    if training.scale.skips:
        training.optimizer.drop_gradients()
    else:
        training.optimizer.step(training.named_parameters(), rate)
        training.parallel.balance.update()
    training.scale.settle()
    return rate
