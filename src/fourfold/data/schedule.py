"""Which sample stands in which row of which step: arithmetic on one integer, the position.

A global batch depends on (seed, epoch, step) alone. Ranks and microbatches are only a way of reading its rows:
G rows are read as [accumulation, degree, micro_batch], so one microbatch of all ranks is a run of rows; in exact mode
as [degree, accumulation, micro_batch], so all microbatches of one rank are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fourfold.data.order import Ids, SampleOrder
from fourfold.spec.errors import DataError, Problem, SpecError

FILLER = -1  # the sample id of a row that holds no sample


def steps_per_epoch(samples: int, global_batch: int, last_batch: Literal["drop", "keep"]) -> int:
    """Global batches of one epoch; a partial one counts only if it is kept."""
    return samples // global_batch if last_batch == "drop" else -(-samples // global_batch)


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The global batches of a run, and the rows of them that each data-parallel rank reads. Steps count from 0.

    global_batch = micro_batch * accumulation * degree, in samples.
    last_batch: "drop" passes over the samples that fill no global batch (others in every epoch);
    "keep" fills the last one up with filler rows (id -1), at its end.
    by_rank: all microbatches of one rank are a run of rows.
    Raises DataError for fewer samples than one global batch (if the last batch is dropped), SpecError where the
    product does not hold.
    """

    samples: int
    global_batch: int
    micro_batch: int
    accumulation: int
    degree: int
    seed: int
    shuffle: bool = True
    last_batch: Literal["drop", "keep"] = "drop"
    by_rank: bool = False

    def __post_init__(self) -> None:
        product = self.micro_batch * self.accumulation * self.degree
        if product != self.global_batch or product < 1:
            raise SpecError(_unequal_product(self))
        if self.steps_per_epoch < 1:
            raise DataError(_too_few_samples(self))

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.samples, self.global_batch, self.last_batch)

    def epoch(self, step: int) -> int:
        """The epoch that the step lies in, from 0."""
        return step // self.steps_per_epoch

    def position(self, step: int) -> int:
        """Samples consumed or passed over before this step, over all epochs: the whole state of the data."""
        return self.epoch(step) * self.samples + step % self.steps_per_epoch * self.global_batch

    def step_at(self, position: int) -> int:
        """The step that begins at this position; SpecError if none does (another global batch, or other data)."""
        epoch, offset = divmod(position, self.samples)
        inside, rest = divmod(offset, self.global_batch)
        if position < 0 or rest or inside >= self.steps_per_epoch:
            raise SpecError(_no_such_position(self, position))
        return epoch * self.steps_per_epoch + inside

    def rows(self, dp_rank: int, micro: int) -> Ids:
        """The rows of a global batch that one rank reads in one microbatch: int64 [micro_batch]."""
        place = dp_rank * self.accumulation + micro if self.by_rank else micro * self.degree + dp_rank
        return place * self.micro_batch + np.arange(self.micro_batch, dtype=np.int64)

    def ids(self, steps: Sequence[int], rows: Ids) -> Ids:
        """The samples in these rows of these steps: int64 [len(steps), len(rows)]; -1 = filler."""
        starts = np.array([step % self.steps_per_epoch for step in steps], dtype=np.int64) * self.global_batch
        positions = starts[:, None] + rows
        found = np.full(positions.shape, FILLER, dtype=np.int64)
        order = SampleOrder(self.samples, self.seed, self.shuffle)
        epochs = np.array([self.epoch(step) for step in steps], dtype=np.int64)[:, None]
        for epoch in np.unique(epochs).tolist():
            asked = (epochs == epoch) & (positions < self.samples)
            found[asked] = order.ids(epoch, positions[asked])
        return found

    def global_ids(self, step: int) -> Ids:
        """The samples of one global batch, by row: int64 [global_batch]; -1 = filler."""
        return self.ids([step], np.arange(self.global_batch, dtype=np.int64)).ravel()

    def micro_ids(self, step: int, dp_rank: int, micro: int) -> Ids:
        """The samples that one rank reads in one microbatch: int64 [micro_batch]; -1 = filler."""
        return self.ids([step], self.rows(dp_rank, micro)).ravel()


def _unequal_product(schedule: BatchSchedule) -> Problem:
    micro, accumulation, degree = schedule.micro_batch, schedule.accumulation, schedule.degree
    product = micro * accumulation * degree
    return Problem(
        asked=f"a global batch of {schedule.global_batch} samples",
        found=f"micro_batch {micro} × accumulation {accumulation} × data-parallel degree {degree} = {product}",
        why="every row of the global batch is read by exactly one rank in one microbatch",
        instead=f"--set batch.global_batch={product}" if product > 0 else "degrees of 1 or more",
    )


def _too_few_samples(schedule: BatchSchedule) -> Problem:
    one_forward = schedule.micro_batch * schedule.degree
    fitting = schedule.samples // one_forward * one_forward
    smaller = f"--set batch.global_batch={fitting} (and no batch.accumulation)   or   " if fitting else ""
    return Problem(
        asked=f"global batches of {schedule.global_batch} samples, the last partial one dropped",
        found=f"{schedule.samples} training samples: fewer than one global batch",
        why="an epoch would have no step at all",
        instead=f"{smaller}--set data.last_batch=keep   or   more data, or a shorter data.sequence",
    )


def _no_such_position(schedule: BatchSchedule, position: int) -> Problem:
    return Problem(
        asked=f"the step that begins at position {position}",
        found=f"{schedule.samples} samples an epoch in {schedule.steps_per_epoch} global batches of "
        f"{schedule.global_batch}",
        why="no global batch begins there",
        instead="the data and batch.global_batch that the position was recorded with",
    )
