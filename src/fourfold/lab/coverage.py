"""The coverage exercise: two ranks and 21 samples, first read rightly, then with each classic mistake switched on.

The mistakes are samplers written out here, as they are found in the wild; the product has none of them. Every one
trains without an error and with a falling loss; only the ledger of sample ids tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from fourfold.data.order import SampleOrder
from fourfold.data.schedule import BatchSchedule
from fourfold.launch.pool import RankPool
from fourfold.record.finding import Finding, document, write_findings
from fourfold.verify.ledger import FILLER, Audit, Ids, audit, coinciding_share
from fourfold.verify.out import open_folder

SCHEMA = "fourfold.lab.coverage/1"
WORLD = 2
SAMPLES = 21  # divides neither into global batches nor over ranks
MICRO_BATCH = 2
GLOBAL_BATCH = MICRO_BATCH * WORLD
EPOCHS = 2
SEED = 7

Sampler = Callable[[int, int], Ids]
"""(epoch, rank) -> the ids one rank reads in one epoch: int64 [n]; -1 = filler."""


def right(epoch: int, rank: int) -> Ids:
    """The product's way: one order for all, cut by arithmetic; the last global batch is filled up, not repeated."""
    schedule = BatchSchedule(SAMPLES, GLOBAL_BATCH, MICRO_BATCH, 1, WORLD, SEED, True, "keep")
    start = epoch * schedule.steps_per_epoch
    return schedule.ids(range(start, start + schedule.steps_per_epoch), schedule.rows(rank, 0)).ravel()


def _shuffled(epoch: int, seed: int = SEED) -> Ids:
    return SampleOrder(SAMPLES, seed).ids(epoch, np.arange(SAMPLES))


def same_for_all(epoch: int, rank: int) -> Ids:  # noqa: ARG001
    """No rank takes a share: a plain shuffling loader under data parallel."""
    return _shuffled(epoch)


def own_seed(epoch: int, rank: int) -> Ids:
    """Each rank shuffles with a seed of its own before it takes every second sample."""
    return _shuffled(epoch, SEED + rank)[rank::WORLD]


def epoch_forgotten(epoch: int, rank: int) -> Ids:  # noqa: ARG001
    """The sampler is never told the epoch."""
    return right(0, rank)


def wrapped_around(epoch: int, rank: int) -> Ids:
    """The last global batch is filled up with the first samples again."""
    whole = -(-SAMPLES // GLOBAL_BATCH) * GLOBAL_BATCH
    return np.resize(_shuffled(epoch), whole)[rank::WORLD]


def own_tail_dropped(epoch: int, rank: int) -> Ids:
    """Each rank drops the partial batch at the end of its own share."""
    share = _shuffled(epoch)[rank::WORLD]
    return share[: len(share) // MICRO_BATCH * MICRO_BATCH]


@dataclass(frozen=True, slots=True)
class Exercise:
    """One way of reading, and what the ledger must say of it."""

    title: str
    sampler: Sampler
    shows: str  # the number of the ledger that gives it away; "" for the right way


EXERCISES: Mapping[str, Exercise] = {
    "right": Exercise("the right way", right, ""),
    "same-samples": Exercise("all ranks read the same samples", same_for_all, "duplicates"),
    "unequal-seeds": Exercise("ranks shuffle with unequal seeds", own_seed, "missing"),
    "epoch-forgotten": Exercise("the epoch is not advanced", epoch_forgotten, "same_order"),
    "wrap-around": Exercise("the last batch wraps around", wrapped_around, "duplicates"),
    "own-tail": Exercise("each rank drops its own tail", own_tail_dropped, "missing"),
}


def read(name: str) -> list[list[int]]:
    """What this rank reads in each epoch; run in every rank. Collectives: none."""
    return [EXERCISES[name].sampler(epoch, dist.get_rank()).tolist() for epoch in range(EPOCHS)]


def lab_coverage(*, out: Path | None = None, command: str = "fourfold lab coverage") -> dict[str, Any]:
    """Run every exercise on two real ranks and audit what they read.

    out: folder for the findings (default: the next free runs/verify-lab-<n>). Returns the document
    fourfold.lab.coverage/1: "pass" if the right way is clean and every mistake is caught.
    """
    entries, findings = [], []
    with RankPool(WORLD) as pool:
        for name, exercise in EXERCISES.items():
            entry = _audited(name, exercise, pool.run(read, name))
            entries.append(entry)
            findings.append(_finding(exercise, entry, command))
    facts: dict[str, Any] = {
        "world": WORLD,
        "samples": SAMPLES,
        "duplicates": entries[0]["duplicates"],
        "missing": entries[0]["missing"],
        "exercises": entries,
    }
    with open_folder(out, "lab") as folder:
        path = write_findings(folder, "lab-coverage", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, findings_file=str(path))


def _audited(name: str, exercise: Exercise, by_rank: Sequence[list[list[int]]]) -> dict[str, Any]:
    """An exercise's ids, by rank and epoch, and what the ledger makes of them."""
    ids = [[np.asarray(epoch, dtype=np.int64) for epoch in rank] for rank in by_rank]
    audits = [audit([_samples(rank[epoch]) for rank in ids], SAMPLES, SAMPLES) for epoch in range(EPOCHS)]
    return {
        "name": name,
        "title": exercise.title,
        "ids": by_rank,
        "duplicates": _total(audits, "duplicates"),
        "missing": _total(audits, "missing"),
        "shared_by_ranks": _total(audits, "shared"),
        "same_order": all(coinciding_share(rank[0], rank[1]) == 1.0 for rank in ids),
    }


def _samples(ids: Ids) -> Ids:
    held: Ids = ids[ids != FILLER]
    return held


def _total(audits: Sequence[Audit], count: str) -> int:
    return sum(getattr(each, count) for each in audits)


def _finding(exercise: Exercise, entry: Mapping[str, Any], command: str) -> Finding:
    clean = not (entry["duplicates"] or entry["missing"] or entry["shared_by_ranks"] or entry["same_order"])
    caught = bool(exercise.shows) and bool(entry[exercise.shows])
    order = "the same order in both epochs" if entry["same_order"] else "another order in epoch 2"
    return Finding(
        claim=f"the mistake is caught: {exercise.title}" if exercise.shows else "the right way is clean",
        kind="fact",
        expected=f"{exercise.shows.replace('_', ' ')} in the ledger"
        if exercise.shows
        else "nothing double, nothing missing",
        measured=f"{entry['duplicates']} double, {entry['missing']} missing, {order}",
        verdict="pass" if (caught if exercise.shows else clean) else "fail",
        command=command,
    )
