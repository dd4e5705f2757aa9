"""One microbatch as arrays, before torch sees it: what the training process, or a worker, computes.

Letters: B rows of the microbatch; a row has the shape of a Sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fourfold.data.order import Ids
from fourfold.data.sample import Array, Sample, Source
from fourfold.data.schedule import BatchSchedule
from fourfold.data.transforms import Transform, transformed

_BLOCK = 1024  # rows whose samples are looked up at once: the order's cost is per call, hardly per row


class Microbatch(NamedTuple):
    """The arrays and numbers of a Batch, as described there: [B, ...]."""

    inputs: Array
    targets: Array
    valid: Array
    documents: Array | None
    sample_ids: Ids
    rows: Ids
    step: int
    epoch: int
    nonpadding: int


class Microbatches:
    """The microbatches of one data-parallel rank. Pickles small, and gives the same bits in every process."""

    def __init__(
        self,
        source: Source,
        schedule: BatchSchedule,
        dp_rank: int,
        seed: int,
        transforms: Sequence[Transform],
    ) -> None:
        self.source = source
        self.schedule = schedule
        self.dp_rank = dp_rank
        self.seed = seed
        self.transforms = tuple(transforms)
        self._first_step = -1
        self._ids: Ids = np.empty((0, 0), dtype=np.int64)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_first_step": -1, "_ids": np.empty((0, 0), dtype=np.int64)}

    def make(self, step: int, micro: int) -> Microbatch:
        """The rank's microbatch `micro` of this step, transforms applied."""
        epoch = self.schedule.epoch(step)
        ids = self._step_ids(step)[micro]
        samples = [self._sample(epoch, sample_id) for sample_id in ids.tolist()]
        rows = self.schedule.rows(self.dp_rank, micro)
        return stacked(self.source, samples, ids, rows, step, epoch)

    def _sample(self, epoch: int, sample_id: int) -> Sample | None:
        if sample_id < 0:
            return None
        return transformed(self.transforms, self.source.sample(sample_id), self.seed, epoch, sample_id)

    def _step_ids(self, step: int) -> Ids:
        """Sample ids of all the rank's microbatches in one step: int64 [accumulation, micro_batch]."""
        schedule = self.schedule
        if not self._first_step <= step < self._first_step + len(self._ids):
            per_step = schedule.accumulation * schedule.micro_batch
            steps = range(step, step + max(1, _BLOCK // per_step))
            rows = np.concatenate(
                [schedule.rows(self.dp_rank, micro) for micro in range(schedule.accumulation)]
            )
            self._ids = schedule.ids(steps, rows).reshape(
                len(steps), schedule.accumulation, schedule.micro_batch
            )
            self._first_step = step
        ids: Ids = self._ids[step - self._first_step]
        return ids


def stacked(
    source: Source, samples: Sequence[Sample | None], ids: Ids, rows: Ids, step: int, epoch: int
) -> Microbatch:
    """Samples as the rows of one microbatch; None is a filler row: zeros, of which no target is valid."""
    form = next((sample for sample in samples if sample is not None), None) or source.largest()
    count = len(samples)
    inputs = np.zeros((count, *form.inputs.shape), form.inputs.dtype)
    targets = np.zeros((count, *form.targets.shape), form.targets.dtype)
    valid = np.zeros((count, *form.valid.shape), np.bool_)
    documents = None if form.documents is None else np.zeros((count, *form.documents.shape), np.int32)
    nonpadding = 0
    for place, sample in enumerate(samples):
        if sample is None:
            continue
        inputs[place], targets[place], valid[place] = sample.inputs, sample.targets, sample.valid
        if documents is not None:
            documents[place] = sample.documents
        nonpadding += sample.nonpadding
    return Microbatch(inputs, targets, valid, documents, ids, rows, step, epoch, nonpadding)
