"""Validation: every sample once, on any number of ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fourfold.collectives.sums import start_sum, sum_exactly, sum_floats
from fourfold.data.loader import validation_batches, validation_length
from fourfold.launch.stop import StopRequest
from fourfold.train.observe import observing
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


def batches_each(training: Training) -> int:
    """How many batches a validation takes on every rank."""
    source, micro_batch = training.sources.validation, training.spec.batch.micro_batch
    assert micro_batch, "the Spec is not settled"
    return (
        0
        if source is None
        else validation_length(source, micro_batch, training.parallel.degree, _limit(training))
    )


def _limit(training: Training) -> int | None:
    spec = training.spec
    assert spec.batch.global_batch, "the Spec is not settled"
    return spec.run.validation_batches * spec.batch.global_batch or None


def validate(
    training: Training, step: int, stop: StopRequest | None = None
) -> ValidationResult | Literal["broken off"] | None:
    """Mean loss over the validation set, with dropout off; None if there is no set.

    stop: when it has come to any rank, all break off before the same batch, the second from then at the latest.
    Collectives: one all-reduce of an integer on the CPU for each batch, asynchronous: it runs beside the forward, and
    no rank waits for another that is less than a batch behind; one of three numbers at the end, and in exact mode an
    all-gather of objects; those of `observing`.
    """
    source = training.sources.validation
    if source is None:
        return None
    start = time.perf_counter()
    spec, parallel = training.spec, training.parallel
    assert spec.batch.micro_batch, "the Spec is not settled"
    float_dtype = training.dtype if training.dtype is torch.float64 else None
    sums = torch.zeros(3, dtype=torch.float64, device=training.device)
    each: list[Tensor] = []  # in exact mode the loss of each batch
    wishes = start_sum([int(stop is not None and stop.requested)])
    with observing(training):
        for batch in validation_batches(
            source,
            spec.batch.micro_batch,
            parallel.degree,
            parallel.dp_rank,
            spec.run.seed,
            limit=_limit(training),
            own=parallel.own,
        ):
            training.beat(step + 1, "validation")
            if wishes.wait() != [0]:  # sent when the batch before began
                return "broken off"
            wishes = start_sum([int(stop is not None and stop.requested)])
            with autocast(spec.precision, training.device):
                loss_of_batch, count = parallel.look(batch.to(training.device, float_dtype))
            filled = (batch.sample_ids >= 0).sum() * int(parallel.speaks)
            if spec.run.exact:
                each.append(loss_of_batch.double())
            sums += torch.stack([loss_of_batch.double(), count.double(), filled.to(training.device).double()])
    wishes.wait()  # what came with the last batch came too late
    loss_sum, targets, samples = sum_floats(sums if parallel.counts else torch.zeros_like(sums)).tolist()
    if spec.run.exact:
        (loss_sum,) = sum_exactly([torch.stack(each).tolist()])
    loss = loss_sum / targets if targets else float("nan")
    return ValidationResult(loss, int(targets), int(samples), time.perf_counter() - start)
