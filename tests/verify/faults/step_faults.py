"""Classic mistakes in the step, planted in a rank by replacing the product's functions by name."""
# ruff: noqa: ARG001, ARG005 - a stand-in has the parameters of what it replaces

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fourfold.data.batch import Batch
from fourfold.models import decoder
from fourfold.parallel.apply import Parallel
from fourfold.train import setup, step
from fourfold.train.setup import Training
from fourfold.train.step import LossPair, PendingTotals, Totals


def _accumulate_with(backward: Any, *, syncs: bool = True) -> None:
    """Replace accumulate by a loop of our own; backward(training, batch, loss_sum, totals) does one microbatch."""

    def accumulate(
        training: Training, batches: Sequence[Batch], pending: PendingTotals
    ) -> tuple[LossPair, Totals]:
        totals = pending.wait()
        sums, counts = [], []
        for index, batch in enumerate(batches):
            last = syncs and index == len(batches) - 1
            with training.parallel.microbatch(last):
                loss_sum, count = training.parallel.module(batch.to(training.device, training.dtype))
                backward(training, batches, loss_sum, totals)
            sums.append(loss_sum.detach())
            counts.append(count)
        return LossPair(torch.stack(sums).sum(), torch.stack(counts).sum()), totals

    step.accumulate = accumulate


def backward_on_rank_0_only() -> None:
    """The others only look on, and nothing is reduced."""

    def backward(training: Training, batches: Any, loss_sum: torch.Tensor, totals: Totals) -> None:
        if dist.get_rank() == 0:
            (loss_sum / totals.count).backward()

    _accumulate_with(backward, syncs=False)


def mean_of_means() -> None:
    """Each rank divides by its own count, and the means are averaged."""

    def backward(
        training: Training, batches: Sequence[Batch], loss_sum: torch.Tensor, totals: Totals
    ) -> None:
        (loss_sum / max(sum(batch.valid_count() for batch in batches), 1)).backward()

    _accumulate_with(backward)


def factor_missing() -> None:
    """Data parallel averages; nobody multiplies by the degree."""

    def backward(training: Training, batches: Any, loss_sum: torch.Tensor, totals: Totals) -> None:
        (loss_sum / totals.count).backward()

    _accumulate_with(backward)


def never_synced() -> None:
    """Every microbatch is taken for one before the last: no gradient is ever reduced, and replicas drift."""
    microbatch = Parallel.microbatch
    Parallel.microbatch = lambda self, last: microbatch(self, False)


def last_microbatch_only() -> None:
    """Gradients are dropped before the last microbatch."""
    microbatch = Parallel.microbatch

    def dropping(self: Parallel, last: bool) -> Any:
        if last:
            self.module.zero_grad(set_to_none=True)
        return microbatch(self, last)

    Parallel.microbatch = dropping


def clipped_before_reduction() -> None:
    """Each rank clips its own gradient; the clipped ones are summed."""
    reduced = step.accumulate
    microbatch = Parallel.microbatch
    Parallel.microbatch = lambda self, last: microbatch(self, False) if last else nullcontext()

    def accumulate(training: Training, *args: Any) -> Any:
        with training.parallel.module.no_sync():
            result = reduced(training, *args)
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.spec.optimizer.clip_norm)
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return result

    step.accumulate = accumulate


def rate_off_by_one() -> None:
    """The learning rate is that of the next step."""
    rate = step.learning_rate
    step.learning_rate = lambda optimizer, total, number: rate(optimizer, total, number + 1)


def dropout_by_local_row() -> None:
    """The dropout mask belongs to the row's place in the microbatch, the same on every rank."""
    draws = decoder.Draws
    decoder.Draws = lambda seed, number, rows, _context: draws(seed, number, torch.arange(len(rows)))


def layer_unused_on_rank_1() -> None:
    """Rank 1 passes over its last block."""
    forward = decoder.Block.forward

    def skipping(self: Any, x: torch.Tensor, shared: Any) -> torch.Tensor:
        last = torch.equal(self.attention.output_key, decoder.draw_key("blocks.1.attention.output"))
        return x if last and dist.get_rank() == 1 else forward(self, x, shared)

    decoder.Block.forward = skipping


def everything_decays() -> None:
    """Weight decay acts on norms and biases, too."""
    build = setup.Optimizer

    def decaying(parameters: Any, spec: Any, *more: Any, **options: Any) -> Any:
        optimizer = build(parameters, spec, *more, **options)
        for group in optimizer.adamw.param_groups:
            group["weight_decay"] = spec.weight_decay
        return optimizer

    setup.Optimizer = decaying


def clip_without_effect() -> None:
    """The norm is told, and nothing is scaled."""
    clip = step.clip

    def unbounded(training: Training) -> torch.Tensor:
        held = [p.grad.clone() for p in training.model.parameters() if p.grad is not None]
        norm = clip(training)
        for p, gradient in zip(
            (p for p in training.model.parameters() if p.grad is not None), held, strict=True
        ):
            p.grad.copy_(gradient)
        return norm

    step.clip = unbounded


def norm_of_one_share() -> None:
    """What is told is the norm of one rank's share of the squares."""
    clip = step.clip
    step.clip = lambda training: clip(training) / dist.get_world_size() ** 0.5


def nan_on_rank_1() -> None:
    """One element of one gradient on one rank is not a number."""
    reduced = step.accumulate

    def accumulate(training: Training, *args: Any) -> Any:
        result = reduced(training, *args)
        if dist.get_rank() == 1:
            training.named_parameters()["norm.weight"].grad[0] = float("nan")
        return result

    step.accumulate = accumulate


def count_of_one_rank() -> None:
    """The denominator is twice rank 0's own count, on every rank: right only where all have equally many."""
    agree = step.agree_totals

    def agreed(training: Training, batches: Sequence[Batch], stop_requested: bool) -> PendingTotals:
        shown = batches if dist.get_rank() == 0 else [replace(b, valid=b.valid & False) for b in batches]
        return agree(training, [*shown, *shown], stop_requested)

    step.agree_totals = agreed
