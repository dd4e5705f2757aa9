"""Validation: every sample once, on any number of ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from fourfold.collectives.sums import sum_floats
from fourfold.data.loader import validation_batches
from fourfold.train.precision import autocast
from fourfold.train.setup import Training


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Loss per valid target over all ranks; `samples` and `targets` are the true numbers, filler left out.

    seconds: how long it took on this rank.
    """

    loss: float
    targets: int
    samples: int
    seconds: float


@torch.no_grad()
def validate(training: Training, step: int) -> ValidationResult | None:
    """Mean loss over the validation set, with dropout off; None if there is no set.

    Collectives: one all-reduce of three numbers, at the end.
    """
    source = training.sources.validation
    if source is None:
        return None
    start = time.perf_counter()
    spec, parallel = training.spec, training.parallel
    assert spec.batch.micro_batch and spec.batch.global_batch, "the Spec is not settled"
    float_dtype = training.dtype if training.dtype is torch.float64 else None
    sums = torch.zeros(3, dtype=torch.float64, device=training.device)
    training.model.eval()
    try:
        for batch in validation_batches(
            source,
            spec.batch.micro_batch,
            parallel.degree,
            parallel.dp_rank,
            spec.run.seed,
            limit=spec.run.validation_batches * spec.batch.global_batch or None,
        ):
            training.beat(step + 1, "validation")
            with autocast(spec.precision, training.device):
                loss_sum, count = training.loss_module(batch.to(training.device, float_dtype))
            filled = (batch.sample_ids >= 0).sum()
            sums += torch.stack([loss_sum.double(), count.double(), filled.to(training.device).double()])
    finally:
        training.model.train()
    loss_sum, targets, samples = sum_floats(sums).tolist()
    loss = loss_sum / targets if targets else float("nan")
    return ValidationResult(loss, int(targets), int(samples), time.perf_counter() - start)
