"""Batches for one data-parallel rank: from this process, or from workers ahead of time, the same bits either way."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import cycle, islice

import numpy as np
import torch

from fourfold.data.batch import Batch
from fourfold.data.microbatch import Microbatch, Microbatches, stacked
from fourfold.data.order import SampleOrder
from fourfold.data.sample import Source
from fourfold.data.schedule import FILLER, BatchSchedule
from fourfold.data.transforms import make_transforms
from fourfold.data.worker import Worker
from fourfold.spec.data import TransformSpec

Own = Callable[[Batch], Batch]

_AHEAD = 2  # microbatches that each worker is asked for before they are needed


class Loader:
    """The training batches of one data-parallel rank.

    workers: processes that compute microbatches ahead; they start with the first step and stay until `close`.
    transforms: as in the Spec; they apply to training samples only. own: what this rank takes of a microbatch.
    Raises SpecError for a transform that does not fit the data.
    """

    def __init__(
        self,
        source: Source,
        schedule: BatchSchedule,
        dp_rank: int,
        seed: int,
        workers: int = 0,
        transforms: Sequence[TransformSpec] = (),
        own: Own = lambda batch: batch,
    ) -> None:
        self._own = own
        self._microbatches = Microbatches(
            source, schedule, dp_rank, seed, make_transforms(transforms, source.vocabulary)
        )
        self._workers = workers
        self._started: list[Worker] = []
        self._idle: list[Worker] = []
        # Also where nobody calls close(): no process outlives its loader.
        weakref.finalize(self, _close, self._started)

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """For each step from start to stop - 1 (they count from 0), the microbatches that this rank accumulates.

        Raises what a transform raises, and DataError if a worker dies or the data cannot be read.
        """
        accumulation = self._microbatches.schedule.accumulation
        requests = ((step, micro) for step in range(start, stop) for micro in range(accumulation))
        made: Generator[Microbatch, None, None]
        if self._workers == 0:
            made = (self._microbatches.make(step, micro) for step, micro in requests)
        else:
            made = self._made_by_workers(requests)
        with closing(made):
            for _ in range(start, stop):
                yield [self._batch(microbatch) for microbatch in islice(made, accumulation)]

    def mock(self) -> Batch:
        """The largest microbatch there can be: full rows of one document, every target valid. Its ids mean nothing."""
        schedule = self._microbatches.schedule
        source = self._microbatches.source
        rows = schedule.rows(self._microbatches.dp_rank, 0)
        samples = [source.largest()] * schedule.micro_batch
        return self._batch(stacked(source, samples, np.zeros_like(rows), rows, step=0, epoch=0))

    def close(self) -> None:
        """End the workers. A loader may be used again afterwards."""
        self._idle = []
        _close(self._started)

    def _made_by_workers(self, requests: Iterator[tuple[int, int]]) -> Generator[Microbatch, None, None]:
        """The microbatches in order, each computed by the next worker in turn."""
        workers, self._idle = self._idle or self._start(), []
        asked: deque[Worker] = deque()

        def answer() -> Microbatch:
            answered = asked[0].answer()
            asked.popleft()
            return answered

        try:
            for (step, micro), worker in zip(requests, cycle(workers), strict=False):
                if len(asked) == _AHEAD * len(workers):
                    yield answer()
                worker.ask(step, micro)
                asked.append(worker)
            while asked:
                yield answer()
        finally:
            if asked or self._idle:  # unread answers lie in their pipes, or others stand by already
                self._discard(workers)
            else:
                self._idle = workers

    def _start(self) -> list[Worker]:
        workers = []
        for _ in range(self._workers):
            workers.append(Worker(self._microbatches))
            self._started.append(workers[-1])
        return workers

    def _discard(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.close()
        self._started[:] = [worker for worker in self._started if worker not in workers]

    def _batch(self, microbatch: Microbatch) -> Batch:
        return self._own(_batch(microbatch, self._microbatches.seed))


def validation_length(source: Source, micro_batch: int, degree: int, limit: int | None = None) -> int:
    """How many batches `validation_batches` gives each rank."""
    samples = len(source) if limit is None else min(limit, len(source))
    return -(-samples // (micro_batch * degree))


def validation_batches(
    source: Source,
    micro_batch: int,
    degree: int,
    dp_rank: int,
    seed: int,
    limit: int | None = None,
    own: Own = lambda batch: batch,
) -> Iterator[Batch]:
    """One rank's share of a pass over the validation samples: over all ranks each comes exactly once.

    limit: samples of a shorter pass, drawn by the seed alone: the same ones for every number of ranks.
    Every rank gets the same number of batches; the last ones are filled up with filler rows. `rows` are places in
    the pass, and `step` counts its batches. No transforms apply.
    """
    samples = len(source) if limit is None else min(limit, len(source))
    order = SampleOrder(len(source), seed)
    for number in range(validation_length(source, micro_batch, degree, limit)):
        rows = (number * degree + dp_rank) * micro_batch + np.arange(micro_batch, dtype=np.int64)
        ids = np.full(micro_batch, FILLER, dtype=np.int64)
        ids[rows < samples] = order.ids(0, rows[rows < samples])
        taken = [None if sample_id < 0 else source.sample(sample_id) for sample_id in ids.tolist()]
        yield own(_batch(stacked(source, taken, ids, rows, step=number, epoch=0), seed))


def _batch(made: Microbatch, seed: int) -> Batch:
    return Batch(
        inputs=torch.from_numpy(made.inputs),
        targets=torch.from_numpy(made.targets),
        valid=torch.from_numpy(made.valid),
        documents=None if made.documents is None else torch.from_numpy(made.documents),
        sample_ids=torch.from_numpy(made.sample_ids),
        rows=torch.from_numpy(made.rows),
        seed=seed,
        step=made.step,
        epoch=made.epoch,
        processed=made.inputs.shape[0] if made.documents is None else made.inputs.size,
        nonpadding=made.nonpadding,
    )


def _close(workers: list[Worker]) -> None:
    while workers:
        workers.pop().close()
