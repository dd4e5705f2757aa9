"""The ledger: which sample every rank was given in every step, and what that amounts to.

Arrays of integers only; where they came from (a real loader, a finished run, an exercise) is not known here.
Letters: S steps, R rows one rank gets in a step (all microbatches), G rows of a global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

FILLER = -1  # the sample id of a row that holds no sample
NO_ROW = -1  # where a rank has fewer rows in a step than in others, or took no part in it
NOT_DELIVERED = -2  # a row of the global batch that no rank was given


@dataclass(frozen=True, slots=True, eq=False)
class RankLedger:
    """What one rank was given.

    ids    int64 [S, R]: sample ids in order of delivery; -1 = filler
    rows   int64 [S, R]: each row's place in the global batch; -1 = there is none
    valid  int64 [S]: targets that carry loss, or None where it was not recorded
    """

    rank: int
    ids: Ids
    rows: Ids
    valid: Ids | None = None

    @property
    def steps(self) -> int:
        return len(self.ids)

    @property
    def taken(self) -> int:
        """Steps in which it had any row."""
        return int((self.rows != NO_ROW).any(axis=1).sum())

    def between(self, start: int, stop: int) -> Ids:
        """The sample ids (filler left out) of steps start … stop - 1, in order of delivery: int64 [n]."""
        ids = self.ids[start:stop].ravel()
        held: Ids = ids[ids != FILLER]
        return held


@dataclass(frozen=True, slots=True)
class Audit:
    """What a set of deliveries amounts to, by counting."""

    delivered: int  # rows that held a sample
    distinct: int
    duplicates: int  # deliveries beyond the first of a sample
    missing: int  # samples that should have come and did not
    shared: int  # samples that more than one rank was given
    strangers: int  # ids that are no sample of the data

    @property
    def clean(self) -> bool:
        return self.duplicates == self.missing == self.shared == self.strangers == 0


def audit(by_rank: Sequence[Ids], samples: int, expected: int) -> Audit:
    """Count deliveries of one epoch (or of one pass over a validation set).

    by_rank: for each rank the ids it was given, int64 [n_r], filler left out.
    samples: size of the data set. expected: how many different samples should have come.
    """
    counts = np.zeros(samples, dtype=np.int64)
    holders = np.zeros(samples, dtype=np.int64)
    delivered = strangers = 0
    for ids in by_rank:
        known = ids[(ids >= 0) & (ids < samples)]
        delivered += len(ids)
        strangers += len(ids) - len(known)
        own = np.bincount(known, minlength=samples)
        counts += own
        holders += own > 0
    distinct = int(np.count_nonzero(counts))
    return Audit(
        delivered=delivered,
        distinct=distinct,
        duplicates=int(counts.sum()) - distinct,
        missing=max(0, expected - distinct),
        shared=int(np.count_nonzero(holders > 1)),
        strangers=strangers,
    )


def never_delivered(by_rank: Sequence[Ids], samples: int) -> Ids:
    """Ids of the data set that no rank was given, ascending: int64 [n]."""
    seen = np.zeros(samples, dtype=bool)
    for ids in by_rank:
        seen[ids[(ids >= 0) & (ids < samples)]] = True
    return np.flatnonzero(~seen)


def first_twice(ledgers: Sequence[RankLedger], start: int, stop: int) -> tuple[int, list[int]]:
    """The lowest sample that came more than once in steps start … stop - 1, and when, as steps from 1."""
    found, counts = np.unique(
        np.concatenate([ledger.between(start, stop) for ledger in ledgers]), return_counts=True
    )
    sample = int(found[counts > 1][0])
    given = [np.flatnonzero((ledger.ids[start:stop] == sample).any(axis=1)) for ledger in ledgers]
    return sample, [start + step + 1 for step in sorted(np.concatenate(given).tolist())]


def first_missing(ledgers: Sequence[RankLedger], start: int, due: Ids) -> tuple[int, int] | None:
    """The first sample of `due` (int64 [S, G], -1 = filler) that did not come in these S steps, and its step from 1."""
    came = np.concatenate([ledger.between(start, start + len(due)) for ledger in ledgers])
    lost = np.argwhere((due != FILLER) & ~np.isin(due, came))
    if not len(lost):
        return None
    step, row = lost[0].tolist()
    return int(due[step, row]), start + step + 1


def global_batches(ledgers: Sequence[RankLedger], global_batch: int) -> Ids:
    """The global batches as they were delivered, by row: int64 [S, G]; -2 where no rank was given the row.

    S is the number of steps that every rank has. Rows outside the global batch are left out.
    """
    steps = min((ledger.steps for ledger in ledgers), default=0)
    placed = np.full((steps, global_batch), NOT_DELIVERED, dtype=np.int64)
    for ledger in ledgers:
        rows, ids = ledger.rows[:steps], ledger.ids[:steps]
        inside = (rows >= 0) & (rows < global_batch)
        step_of = np.broadcast_to(np.arange(steps)[:, None], rows.shape)
        placed[step_of[inside], rows[inside]] = ids[inside]
    return placed


def coinciding_share(first: Ids, second: Ids) -> float:
    """The share of positions at which two orders (int64 [n]) hold the same sample; 1.0 = the same order."""
    length = min(len(first), len(second))
    if length == 0:
        return 0.0
    return float(np.mean(first[:length] == second[:length]))
