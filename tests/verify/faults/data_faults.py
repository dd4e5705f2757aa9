"""Classic mistakes in reading data, planted in a rank by replacing the product's functions by name."""
# ruff: noqa: ARG001, ARG005 - a stand-in has the parameters of what it replaces

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from fourfold.data import loader
from fourfold.data.loader import Loader
from fourfold.data.schedule import BatchSchedule
from fourfold.train import setup


def same_samples_everywhere() -> None:
    """No rank takes a share of its own: all read rank 0's rows."""
    rows = BatchSchedule.rows
    BatchSchedule.rows = lambda self, dp_rank, micro: rows(self, 0, micro)


def unequal_seeds() -> None:
    """Each rank shuffles with a seed of its own."""
    made = setup.batch_schedule

    def schedule(*args: Any) -> BatchSchedule:
        shared = made(*args)
        return replace(shared, seed=shared.seed + dist.get_rank())

    setup.batch_schedule = schedule


def epoch_not_advanced() -> None:
    """The order never hears of the epoch."""
    BatchSchedule.epoch = lambda self, step: 0


def wrap_around() -> None:
    """What the last global batch lacks is taken from the first samples again."""
    ids = BatchSchedule.ids

    def wrapped(self: BatchSchedule, steps: Any, rows: Any) -> Any:
        found = ids(self, steps, rows)
        first = ids(self, [0], np.arange(self.global_batch))[0]
        return np.where(found < 0, first[rows % self.global_batch], found)

    BatchSchedule.ids = wrapped


def one_step_short() -> None:
    """Rank 1 drops its last step."""
    steps = Loader.steps

    def short(self: Loader, start: int, stop: int) -> Iterator[Any]:
        return steps(self, start, stop - dist.get_rank())

    Loader.steps = short


def validation_on_every_rank() -> None:
    """Each rank validates on the whole set, and the sums count it twice."""
    batches = loader.validation_batches

    def whole(source: Any, micro_batch: int, degree: int, dp_rank: int, *args: Any, **more: Any) -> Any:
        return batches(source, micro_batch, 1, 0, *args, **more)

    loader.validation_batches = whole


def padding_counted() -> None:
    """The loader marks every target valid, padding and first tokens of other documents too."""
    made = loader._batch
    loader._batch = lambda *args: replace(made(*args), valid=made(*args).valid | True)
