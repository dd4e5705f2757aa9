"""Coverage: every sample exactly once, in every epoch, on any number of ranks; shown by what ranks were given.

`verify_coverage` lets real ranks read the trainer's own loader through whole epochs; `run_coverage` reads what a
run wrote down while it trained. Both fill the same ledger and ask it the same questions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.data.schedule import BatchSchedule
from fourfold.data.source import open_sources
from fourfold.data.transforms import make_transforms
from fourfold.launch.pool import RankPool
from fourfold.record.reader import RunReader
from fourfold.spec.errors import DataError, Problem, RankFailed, SpecError
from fourfold.spec.rules import require
from fourfold.spec.settle import data_parallel_degree, settle
from fourfold.spec.spec import Spec
from fourfold.train.setup import batch_schedule
from fourfold.verify.deliver import Delivery, deliver
from fourfold.verify.ledger import RankLedger
from fourfold.verify.ledger_check import LedgerCheck
from fourfold.verify.out import open_folder

TIMEOUT_S = 3600.0  # the longest the asked epochs may take to be read


def verify_coverage(
    spec: Spec,
    world: int,
    *,
    epochs: int = 2,
    max_steps: int | None = None,
    out: Path | None = None,
    setup: str | None = None,
    timeout_s: float = TIMEOUT_S,
    command: str = "",
) -> dict[str, Any]:
    """Read `epochs` epochs and the validation set on `world` real ranks, and audit the ledger.

    spec: settled or not. max_steps: a shorter ledger, which proves less and says so. out: folder for the findings
    (default: the next free runs/verify-<name>-<n>). setup: "module:function" called in every rank first.
    command: to repeat it. Returns the document fourfold.verify.coverage/1; a rank that fails is a failed finding.
    Raises SpecError or DataError for a request or data that cannot be trained on.
    """
    if epochs < 1 or (max_steps is not None and max_steps < 1):
        asked = f"--epochs {epochs}" if epochs < 1 else f"--max-steps {max_steps}"
        raise SpecError(Problem(asked, "no step at all", "nothing would be counted", "--epochs 2"))
    settled = settle(spec, world)
    require(settled, "train")
    sources = open_sources(settled)
    schedule = batch_schedule(settled, len(sources.train), data_parallel_degree(settled.layout))
    steps = epochs * schedule.steps_per_epoch
    steps = steps if max_steps is None else min(steps, max_steps)
    folder = open_folder(out, settled.name)
    check = LedgerCheck(schedule, _other_degrees(settled, len(sources.train)), command)
    try:
        with RankPool(world, timeout_s=timeout_s, setup=setup) as pool:
            deliveries: list[Delivery] = pool.run(deliver, settled, steps)
    except RankFailed as failure:
        check.nothing_came(steps, failure.problems[0].found)
    else:
        ledgers = [delivery.ledger for delivery in deliveries]
        transforms = make_transforms(settled.data.transforms, sources.train.vocabulary)
        check.ledger(ledgers, steps)
        check.denominators(ledgers, sources.train, transforms)
        samples = len(sources.validation) if sources.validation is not None else None
        check.validation([delivery.validation for delivery in deliveries], samples)
    return check.document(folder, "coverage", settled, world)


def run_coverage(path: Path, *, out: Path | None = None, command: str = "") -> dict[str, Any]:
    """Audit what the ranks of a run wrote into events/rank*.jsonl: evidence of the run that happened.

    path: a run directory, finished or not; the findings go there unless `out` is given.
    Returns as `verify_coverage`. Raises DataError if the record cannot be read or holds no steps.
    """
    reader = RunReader(path)
    spec = reader.spec()
    degree = data_parallel_degree(spec.layout)
    sources = open_sources(spec)
    _check_data(reader, sources.content_hash)
    schedule = batch_schedule(spec, len(sources.train), degree)
    ledgers = [_recorded(reader, rank, schedule) for rank in reader.ranks()]
    if not any(ledger.steps for ledger in ledgers):
        raise DataError(
            Problem(
                asked=f"the samples that {path} was trained on",
                found="no step in any of its events",
                why="coverage of a run is read from what its ranks wrote down",
                instead=f"fourfold verify coverage {spec.name} --world {degree}",
            )
        )
    check = LedgerCheck(schedule, _other_degrees(spec, schedule.samples), command, "this run: ")
    check.fact("every rank left a record", f"{degree} ranks", f"{len(ledgers)} ranks", len(ledgers) == degree)
    last = max(ledger.steps for ledger in ledgers)
    if not all(_ended(reader, ledger.rank) for ledger in ledgers):
        # Ranks of a run that failed stop where they stood: only what all of them wrote down can be judged.
        last = min(ledger.steps for ledger in ledgers)
        ledgers = [RankLedger(ledger.rank, ledger.ids[:last], ledger.rows[:last]) for ledger in ledgers]
        check.open("steps after the run failed", f"{last} steps are on all ranks' records", "a run that ends")
    check.ledger(ledgers, last)
    folder = open_folder(path if out is None else out, spec.name)
    return check.document(folder, "coverage-of-run", spec, degree)


def _recorded(reader: RunReader, rank: int, schedule: BatchSchedule) -> RankLedger:
    """One rank's ledger from its events; where each id stands in the global batch is the schedule's arithmetic."""
    by_step: dict[int, list[int]] = {}
    for event in reader.events(rank):
        if event["kind"] == "start":  # a resumed run takes back what came after its checkpoint
            by_step = {step: ids for step, ids in by_step.items() if step <= event["step"]}
        elif event["kind"] == "step":
            by_step[event["step"]] = event["sample_ids"]
    ids = [by_step[step] for step in sorted(by_step)]
    width = schedule.accumulation * schedule.micro_batch
    if any(len(step) != width for step in ids) or rank >= schedule.degree:
        raise DataError(
            Problem(
                asked=f"{width} sample ids in each step of rank {rank}",
                found=f"steps with {', '.join(map(str, sorted({len(step) for step in ids})))}",
                why=f"its Spec says {schedule.degree} ranks, and so many samples on each",
                instead=f"ls -l {reader.dir.events_dir}",
            )
        )
    rows = np.concatenate([schedule.rows(rank, micro) for micro in range(schedule.accumulation)])
    placed = np.asarray(ids, dtype=np.int64).reshape(len(ids), width)
    return RankLedger(rank, placed, np.broadcast_to(rows, placed.shape))


def _check_data(reader: RunReader, content_hash: str) -> None:
    """The data read today are those of the run, by their hash in its census."""
    for rank in reader.ranks():
        census = next((event for event in reader.events(rank) if event["kind"] == "census"), {})
        held = census.get("training data", content_hash)
        if held != content_hash:
            raise DataError(
                Problem(
                    asked=f"the data that {reader.dir.path} was trained on",
                    found=f"other data: hash {content_hash} now, {held} then",
                    why="sample ids name samples of the data as they were",
                    instead="the files, or for the standard library's text the Python, of that time",
                )
            )


def _other_degrees(spec: Spec, samples: int) -> Callable[[int], BatchSchedule]:
    """The product's schedule of the same Spec for another data-parallel degree."""

    def at_degree(degree: int) -> BatchSchedule:
        batch = spec.batch
        assert batch.global_batch and batch.micro_batch, "the Spec is not settled"
        accumulation = batch.global_batch // (degree * batch.micro_batch)
        cut = batch.model_copy(update={"accumulation": accumulation})
        return batch_schedule(spec.model_copy(update={"batch": cut}), samples, degree)

    return at_degree


def _ended(reader: RunReader, rank: int) -> bool:
    last = [event["kind"] for event in reader.events(rank) if event["kind"] in ("start", "end")][-1:]
    return last == ["end"]
