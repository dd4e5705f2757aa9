"""The questions put to a ledger, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from fourfold.data.sample import Source
from fourfold.data.schedule import BatchSchedule
from fourfold.data.transforms import Transform, transformed
from fourfold.record.finding import Finding, document, fact, not_tested, write_findings
from fourfold.record.run_dir import RunDir
from fourfold.spec.spec import Spec
from fourfold.verify.ledger import (
    FILLER,
    NO_ROW,
    NOT_DELIVERED,
    Audit,
    Ids,
    RankLedger,
    audit,
    coinciding_share,
    first_missing,
    first_twice,
    global_batches,
    never_delivered,
)

SCHEMA = "fourfold.verify.coverage/1"
_NAMED = 8  # ids shown of a longer list
_FEW = 16  # of so few samples two honest orders may be much alike
_ALIKE = 0.5  # share of places with the same sample: honest orders of n samples have about 1 / n


@dataclass(slots=True)
class LedgerCheck:
    """The questions put to a ledger, and what it answered."""

    schedule: BatchSchedule
    at_degree: Callable[[int], BatchSchedule]  # how the product would cut the same batches over other ranks
    command: str  # to repeat the check
    subject: str = ""  # whose ledger it is, in front of every claim
    findings: list[Finding] = field(default_factory=list)
    duplicates: int = 0
    missing: int = 0
    ranks: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)

    def fact(self, claim: str, expected: str, measured: str, holds: bool) -> None:
        self.findings.append(fact(self.subject + claim, expected, measured, holds, command=self.command))

    def open(self, claim: str, why: str, would_test: str) -> None:
        self.findings.append(not_tested(self.subject + claim, why, would_test))

    def nothing_came(self, steps: int, why: str) -> None:
        """A rank failed before its ledger was handed over: nothing is known to have been delivered."""
        self.fact("every rank reads its share to the end", "no error", why, False)
        whole, rest = divmod(steps, self.schedule.steps_per_epoch)
        self.missing = whole * self._due(self.schedule.steps_per_epoch) + self._due(rest)

    def ledger(self, ledgers: Sequence[RankLedger], asked: int, due: Sequence[int] | None = None) -> None:
        """Everything that sample ids alone can say about `asked` steps.

        due: how many of them each rank took part in, where ranks come and go.
        """
        if due is None:
            counts = [ledger.steps for ledger in ledgers]
            self.fact(
                "every rank takes the same number of steps",
                f"{asked} on each",
                ", ".join(f"{c}" for c in dict.fromkeys(counts)),
                set(counts) == {asked},
            )
        else:
            taken = [ledger.taken for ledger in ledgers]
            self.fact(
                f"every rank takes each of the {asked} steps that it is there for",
                ", ".join(map(str, due)),
                ", ".join(map(str, taken)),
                taken == [*due],
            )
        self._epochs(ledgers, asked)
        delivered = global_batches(ledgers, self.schedule.global_batch)
        self._order(delivered)
        self._degrees(delivered)

    def peers(self, share: str, differing: Sequence[str]) -> None:
        """Whether ranks with the same share of the samples were given the same; `differing` says where not."""
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        self.fact(
            f"tensor-parallel ranks are given the same {share}",
            "equal on all ranks of a group",
            differing[0] + more if differing else "equal",
            not differing,
        )

    def count(self, ledgers: Sequence[RankLedger]) -> None:
        """What each rank was given, in numbers."""
        self.ranks = [
            {
                "rank": ledger.rank,
                "steps": ledger.taken,
                "samples": int((ledger.ids != FILLER).sum()),
                "fillers": int(((ledger.ids == FILLER) & (ledger.rows != NO_ROW)).sum()),
            }
            for ledger in ledgers
        ]

    def _epochs(self, ledgers: Sequence[RankLedger], steps: int) -> None:
        per_epoch = self.schedule.steps_per_epoch
        audits: list[Audit] = []
        twice = lost = ""  # the first of each, by name
        for epoch in range(-(-steps // per_epoch)):
            start, stop = epoch * per_epoch, min((epoch + 1) * per_epoch, steps)
            by_rank = [ledger.between(start, stop) for ledger in ledgers]
            found = audit(by_rank, self.schedule.samples, self._due(stop - start))
            audits.append(found)
            if found.duplicates and not twice:
                sample, steps_of = first_twice(ledgers, start, stop)
                twice = f": sample {sample} in steps {' and '.join(map(str, steps_of))}"
            if found.missing and not lost:
                due = self.schedule.ids(range(start, stop), np.arange(self.schedule.global_batch))
                first = first_missing(ledgers, start, due)
                lost = f": sample {first[0]}, due in step {first[1]}" if first is not None else ""
            whole = stop - start == per_epoch
            never = never_delivered(by_rank, self.schedule.samples) if whole else np.empty(0, np.int64)
            self.epochs.append(
                {
                    "epoch": epoch,
                    "steps": stop - start,
                    "whole": whole,
                    "samples": found.distinct,
                    "duplicates": found.duplicates,
                    "missing": found.missing,
                    "shared_by_ranks": found.shared,
                    "not_in_the_data": found.strangers,
                    "dropped": max(0, len(never) - found.missing),
                    "dropped_ids": never[:_NAMED].tolist() if not found.missing else [],
                }
            )
        self.duplicates = sum(a.duplicates for a in audits)
        self.missing = sum(a.missing for a in audits)
        partial = [epoch for epoch in self.epochs if not epoch["whole"]]
        each = f"in each of {len(audits)} epochs" if len(audits) > 1 else "in the epoch"
        each += " as far as it was read" if partial else ""
        self.fact(
            f"no sample comes twice {each}",
            "0 duplicates",
            f"{self.duplicates} duplicates{twice}",
            not self.duplicates,
        )
        self.fact(
            f"no sample is missing {each}", "0 missing", f"{self.missing} missing{lost}", not self.missing
        )
        shared = sum(a.shared for a in audits)
        self.fact(f"no two ranks share a sample {each}", "0 shared", f"{shared} shared", not shared)
        strangers = sum(a.strangers for a in audits)
        if strangers:
            self.fact("every id is a sample of the data", "0 others", f"{strangers} others", False)
        if partial:
            self.open(
                f"the rest of epoch {partial[-1]['epoch'] + 1}",
                f"the ledger holds {partial[-1]['steps']} of its {per_epoch} steps",
                "fourfold verify coverage SPEC --world N without --max-steps, or a longer run",
            )

    def _due(self, steps: int) -> int:
        """Different samples that the first `steps` steps of an epoch must give, by arithmetic on sizes alone."""
        return min(steps * self.schedule.global_batch, self.schedule.samples)

    def _order(self, delivered: Ids) -> None:
        per_epoch = self.schedule.steps_per_epoch
        orders = [
            delivered[start : start + per_epoch].ravel() for start in range(0, len(delivered), per_epoch)
        ]
        if not self.schedule.shuffle:
            lying = np.arange(min(len(orders[0]), self.schedule.samples))
            same = all(coinciding_share(order[: len(lying)], lying[: len(order)]) == 1.0 for order in orders)
            self.fact(
                "without shuffle samples come as they lie", "0, 1, 2, …", "so" if same else "otherwise", same
            )
            return
        samples = self.schedule.samples
        if samples < _FEW:
            self.open(
                "samples are shuffled", f"{samples} samples: orders may be alike by chance", "more samples"
            )
            return
        share = coinciding_share(orders[0], np.arange(len(orders[0])))
        self.fact(
            "samples are shuffled",
            "hardly any sample at the place where it lies",
            f"{share:.2%} of the places hold the sample that lies there",
            share < _ALIKE,
        )
        if len(orders) < 2:
            self.open(
                "the order changes between epochs", "the ledger holds one epoch", "a ledger of two epochs"
            )
            return
        share = max(coinciding_share(a, b) for a, b in pairwise(orders))
        self.fact(
            "the order changes between epochs",
            "hardly any sample at the same place",
            f"the same sample at {share:.2%} of the places",
            share < _ALIKE,
        )

    def _degrees(self, delivered: Ids) -> None:
        """Global batches as delivered here against those of every degree that divides, by the product's schedule."""
        schedule = self.schedule
        degrees = [
            d
            for d in range(1, schedule.global_batch + 1)
            if schedule.global_batch % (d * schedule.micro_batch) == 0
        ]
        differing: dict[int, tuple[int, bool]] = {}
        for degree in degrees:
            other = self.at_degree(degree)
            rows = np.concatenate(
                [other.rows(rank, micro) for micro in range(other.accumulation) for rank in range(degree)]
            )
            rows = rows[(rows >= 0) & (rows < schedule.global_batch)]
            expected = np.full_like(delivered, NOT_DELIVERED)
            expected[:, rows] = other.ids(range(len(delivered)), rows)
            wrong = np.flatnonzero((expected != delivered).any(axis=1))
            if len(wrong):
                step = int(wrong[0])
                as_sets = set(expected[step].tolist()) == set(delivered[step].tolist())
                differing[degree] = (step + 1, as_sets)
        measured = f"equal in {len(delivered)} steps"
        if differing:
            degree, (step, as_sets) = next(iter(differing.items()))
            how = "the same samples in other rows" if as_sets else "other samples"
            measured = f"degree {degree}, step {step}: {how}"
        self.fact(
            f"global batches are those of data-parallel degrees {', '.join(map(str, degrees))}",
            "the same sample in every row of every step",
            measured,
            not differing,
        )

    def denominators(
        self, ledgers: Sequence[RankLedger], source: Source, transforms: Sequence[Transform]
    ) -> None:
        """Valid targets over all ranks, step by step, against a count of our own over the samples of the step."""
        delivered = global_batches(ledgers, self.schedule.global_batch)
        steps = len(delivered)
        given = np.sum([ledger.valid[:steps] for ledger in ledgers if ledger.valid is not None], axis=0)
        direct = np.zeros(steps, dtype=np.int64)
        per_epoch = self.schedule.steps_per_epoch
        known: dict[int, int] = {}
        for start in range(0, steps, per_epoch):
            if transforms:  # one may draw anew in every epoch
                known = {}
            ids = delivered[start : start + per_epoch]
            for i in np.unique(ids[(ids >= 0) & (ids < len(source))]).tolist():
                if i not in known:
                    sample = source.sample(i)
                    sample = transformed(transforms, sample, self.schedule.seed, start // per_epoch, i)
                    known[i] = int(np.count_nonzero(sample.valid))
            direct[start : start + per_epoch] = [sum(known.get(i, 0) for i in row) for row in ids.tolist()]
        wrong = np.flatnonzero(given != direct)
        measured = f"{int(given.sum()):,} targets, equal in {steps} steps"
        if len(wrong):
            step = int(wrong[0])
            measured = f"step {step + 1}: {int(given[step])} over the ranks, {int(direct[step])} counted"
        self.fact(
            "loss denominators: valid targets over ranks are those of the global batch",
            "equal in every step",
            measured,
            not len(wrong),
        )

    def validation(self, by_rank: Sequence[Ids], samples: int | None) -> None:
        """One pass over the validation set."""
        if samples is None:
            return
        found = audit(by_rank, samples, samples)
        self.fact(
            "validation visits each sample exactly once",
            f"{samples:,} samples, 0 twice, 0 missing",
            f"{found.distinct:,} samples, {found.duplicates} twice, {found.missing} missing",
            found.clean and found.delivered == samples,
        )

    def document(self, run: RunDir, name: str, spec: Spec, world: int, **more: Any) -> dict[str, Any]:
        """The document fourfold.verify.coverage/1, also written to findings/<name>.json. more: keys of it."""
        facts = {
            "spec": spec.name,
            "world": world,
            "samples": self.schedule.samples,
            "global_batch": self.schedule.global_batch,
            "duplicates": self.duplicates,
            "missing": self.missing,
            "ranks": self.ranks,
            "epochs": self.epochs,
            **more,
        }
        path = write_findings(run, name, self.findings, SCHEMA, **facts)
        return document(SCHEMA, self.findings, **facts, findings_file=str(path))
