"""Ranks that work on the same samples: tensor-parallel peers see what one of them sees, and it counts once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.spec.grid import Grid
from fourfold.spec.words import counted
from fourfold.verify.ledger import Ids, RankLedger


def one_of_each(ledgers: Sequence[RankLedger], grid: Grid) -> tuple[list[RankLedger], list[str]]:
    """The first rank's ledger for each share of the samples; and how others with the same share differ from it.

    ledgers: of some or all ranks of `grid`, in order.
    """
    leaders: dict[int, RankLedger] = {}
    differing = []
    for ledger in ledgers:
        leader = leaders.setdefault(grid.index(ledger.rank, "dp"), ledger)
        where = _first_difference(ledger, leader)
        if where:
            differing.append(f"rank {ledger.rank} against rank {leader.rank}: {where}")
    return [leaders[share] for share in sorted(leaders)], differing


def one_pass_of_each(by_rank: Sequence[Ids], grid: Grid) -> tuple[list[Ids], list[str]]:
    """The same for one pass over a validation set; by_rank: the sample ids of every rank of `grid`, int64 [n]."""
    leaders: dict[int, int] = {}
    differing = []
    for rank, ids in enumerate(by_rank):
        leader = leaders.setdefault(grid.index(rank, "dp"), rank)
        if not np.array_equal(ids, by_rank[leader]):
            differing.append(f"rank {rank} against rank {leader}: other samples of the validation set")
    return [by_rank[rank] for rank in leaders.values()], differing


def _first_difference(ledger: RankLedger, leader: RankLedger) -> str:
    if ledger.steps != leader.steps:
        return f"{counted(ledger.steps, 'step')}, not {leader.steps}"
    told = (("samples", ledger.ids, leader.ids), ("rows", ledger.rows, leader.rows))
    for what, mine, others in told:
        wrong = np.flatnonzero((mine != others).any(axis=1))
        if len(wrong):
            return f"other {what} in step {wrong[0] + 1}"
    if ledger.valid is not None and leader.valid is not None:
        wrong = np.flatnonzero(ledger.valid != leader.valid)
        if len(wrong):
            return f"other valid targets in step {wrong[0] + 1}"
    return ""
