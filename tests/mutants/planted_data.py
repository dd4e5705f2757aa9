"""Kinds of faults in reading data and in validation that no other file plants, for `make mutants`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.data import loader, pack
from fourfold.data.batch import Batch
from fourfold.data.sample import Sample, Source
from fourfold.data.schedule import BatchSchedule
from fourfold.models.attention import Cached

put: Any = setattr


def split_twice() -> None:
    """What is a rank's own already is split over the ranks again: of its steps each passes over all but some."""
    ids = BatchSchedule.ids

    def again(self: BatchSchedule, steps: Sequence[int], rows: Any) -> Any:
        return ids(self, [step * self.degree for step in steps], rows)

    put(BatchSchedule, "ids", again)


@dataclass(frozen=True)
class _FilledUp:
    source: Source
    size: int

    @property
    def vocabulary(self) -> int | None:
        return self.source.vocabulary

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Sample:
        return self.source.sample(index % len(self.source))

    def largest(self) -> Sample:
        return self.source.largest()

    def counts(self) -> dict[str, int]:
        return dict(self.source.counts())


def validation_filled_up_and_counted() -> None:
    """The last batches of a validation are filled up with its first samples, and those count again."""
    batches = loader.validation_batches

    def filled(source: Source, micro_batch: int, degree: int, *more: Any, **named: Any) -> Iterator[Batch]:
        whole = -(-len(source) // (micro_batch * degree)) * micro_batch * degree
        whole += micro_batch * degree * (whole == len(source))  # always something to fill
        for batch in batches(_FilledUp(source, whole), micro_batch, degree, *more, **named):
            yield replace(batch, sample_ids=torch.from_numpy(np.asarray(batch.sample_ids) % len(source)))

    put(loader, "validation_batches", filled)


def last_sample_dropped() -> None:
    """Packing ends one sample too early."""
    length = pack.PackedSource.__len__
    put(pack.PackedSource, "__len__", lambda self: length(self) - 1)


def mask_edited_in_place() -> None:
    """One mask for each shape is kept, and every batch adds its own documents to it."""
    made, kept = Cached.mask, dict[Any, Tensor]()

    def mask(self: Cached, documents: Tensor, dtype: torch.dtype) -> Tensor:
        new = made(self, documents, dtype)
        held = kept.setdefault((new.shape, dtype), new.clone())
        with torch.no_grad():
            torch.minimum(held, new, out=held)
        return held.clone()

    put(Cached, "mask", mask)
