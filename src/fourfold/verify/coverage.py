"""Coverage: every sample exactly once, in every epoch, on any number of ranks; shown by what ranks were given.

`verify_coverage` lets real ranks read the trainer's own loader through whole epochs; `run_coverage` reads what a
run wrote down while it trained. Both fill the same ledger and ask it the same questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fourfold.data.schedule import BatchSchedule
from fourfold.data.source import open_sources
from fourfold.data.transforms import make_transforms
from fourfold.launch.pool import RankPool
from fourfold.record.lock import at_work
from fourfold.record.reader import RunReader
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import DataError, Problem, RankFailed, SpecError
from fourfold.spec.grid import Grid
from fourfold.spec.rules import require
from fourfold.spec.settle import data_parallel_degree, settle
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted
from fourfold.train.setup import batch_schedule
from fourfold.verify.deliver import Delivery, deliver
from fourfold.verify.ledger import RankLedger
from fourfold.verify.ledger_check import LedgerCheck
from fourfold.verify.out import open_folder
from fourfold.verify.peers import one_of_each, one_pass_of_each
from fourfold.verify.recorded import Course, Record, lacking, not_as_due, read_records

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
    Raises SpecError or DataError for a request or data that cannot be trained on, in a rank too.
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
    check = LedgerCheck(schedule, _other_degrees(settled, len(sources.train)), command)
    with open_folder(out, settled.name) as folder:
        deliveries = _delivered(settled, world, steps, setup, timeout_s)
    if isinstance(deliveries, str):
        check.nothing_came(steps, deliveries)
    else:
        every = [delivery.ledger for delivery in deliveries]
        check.count(every)
        ledgers = _of_shares(check, every, Grid.of(settled.layout))
        transforms = make_transforms(settled.data.transforms, sources.train.vocabulary)
        check.ledger(ledgers, steps)
        check.denominators(ledgers, sources.train, transforms)
        samples = len(sources.validation) if sources.validation is not None else None
        passes, differing = one_pass_of_each([d.validation for d in deliveries], Grid.of(settled.layout))
        if samples is not None and len(passes) < world:
            check.peers("validation samples", differing)
        check.validation(passes, samples)
    return check.document(folder, "coverage", settled, world)


def _delivered(
    spec: Spec, world: int, steps: int, setup: str | None, timeout_s: float
) -> list[Delivery] | str:
    """What each rank was given, or how the first of them failed. Raises what they refuse of the request."""
    try:
        with RankPool(world, timeout_s=timeout_s, setup=setup) as pool:
            return pool.run(deliver, spec, steps)
    except RankFailed as failure:
        if (refused := failure.refusal()) is not None:
            raise refused from failure
        return failure.problems[0].found


def run_coverage(path: Path, *, out: Path | None = None, command: str = "") -> dict[str, Any]:
    """Audit what the ranks of a run wrote into events/rank*.jsonl: evidence of the run that happened.

    path: a run directory, finished or not; the findings go there unless `out` is given. In exact mode its starts may
    have been on several numbers of ranks. Returns as `verify_coverage`, with `starts`, and the ranks of the last one as
    its world. Raises DataError if the record cannot be read or holds no steps.
    """
    reader = RunReader(path)
    spec = reader.spec()
    grid = Grid.of(spec.layout)
    sources = open_sources(spec)
    _check_data(reader, sources.content_hash)
    at_degree = _other_degrees(spec, len(sources.train))
    course, records = read_records(reader, grid, at_degree)
    world = course.last.world
    if not any(record.by_step for record in records):
        raise DataError(
            Problem(
                asked=f"the samples that {path} was trained on",
                found="no step in any of its events",
                why="coverage of a run is read from what its ranks wrote down",
                instead=f"fourfold verify coverage {spec.name} --world {world}",
            )
        )
    check = LedgerCheck(at_degree(grid.degree("dp")), at_degree, command, "this run: ")
    going_on = [record for record in records if record.rank < world]
    last = max((record.reached for record in going_on), default=course.last.began)
    going = not all(record.ending for record in going_on)
    if going and len(going_on) == world:
        # Ranks that go on, or died, stand at different steps: only what all of them wrote down can be judged.
        last = min(record.reached for record in going_on)
    if going or any(record.ending == "stopped" for record in going_on):
        check.open(*_still_to_come(reader.dir, last, spec.run.steps))
    expected = max(start.world for start in course.starts)
    told = counted(len(records), "rank")
    if going and len(going_on) < world:  # the others may not have begun theirs yet
        check.open(
            "every rank left a record", f"{told} of {expected}", "the same command, when all have begun"
        )
        check.count([record.ledger(course, last) for record in records])
        _as_scheduled(check, records, course, last)
    else:
        check.fact("every rank left a record", counted(expected, "rank"), told, len(records) == expected)
        _judge(check, reader.dir, records, course, last, grid)
    starts = [{"after_step": start.began, "ranks": start.world} for start in course.starts]
    with open_folder(path if out is None else out, spec.name) as folder:
        return check.document(folder, "coverage-of-run", spec, world, starts=starts)


def _judge(
    check: LedgerCheck, run: RunDir, records: Sequence[Record], course: Course, last: int, grid: Grid
) -> None:
    """The steps up to `last`: all that their ledger says, or, where lines of them are lost, what is left."""
    ledgers = [record.ledger(course, last) for record in records]
    check.count(ledgers)
    if without := lacking(records, course, last):
        measured = "; ".join(
            f"{run.events(rank)} has no line of {_spans(steps)} of rank {rank}: nothing can be said of them"
            for rank, steps in without.items()
        )
        check.fact("the record holds every step of every rank", f"steps 1-{last} of each", measured, False)
        _as_scheduled(check, records, course, last)
    elif last and len(course.worlds) > 1:
        check.ledger(ledgers, last, [len(course.due(record.rank, last)) for record in records])
    elif last:
        check.ledger(_of_shares(check, ledgers, grid), last)


def _as_scheduled(check: LedgerCheck, records: Sequence[Record], course: Course, last: int) -> None:
    """What an incomplete record still shows: the samples of the steps that are in it."""
    lines, wrong = not_as_due(records, course, last)
    measured = wrong[0] if wrong else f"so in {lines} lines"
    check.fact("every line of a step has the samples that are due in it", "the same", measured, not wrong)


def _of_shares(check: LedgerCheck, ledgers: Sequence[RankLedger], grid: Grid) -> list[RankLedger]:
    """One ledger for each share of the samples; where several ranks have one share, whether they agree."""
    shares, differing = one_of_each(ledgers, grid)
    if grid.world > grid.degree("dp"):
        check.peers("samples", differing)
    return shares


def _still_to_come(run: RunDir, done: int, asked: int) -> tuple[str, str, str]:
    """An open point: what an unfinished run has not done yet can neither hold nor fail."""
    state = "it is still going on" if at_work(run) else "it stopped unfinished"
    measured = f"the run has {done} of {asked} steps on all ranks' records: {state}"
    claim = "the steps still to come" if done < asked else "that the run ends well"
    return claim, measured, "the same command, when the run is finished"


def _spans(steps: Sequence[int]) -> str:
    """Ascending step numbers in words: "steps 1-4, 9"."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    told = ", ".join(f"{first}-{end}" if end > first else f"{first}" for first, end in spans)
    return f"step{'s' if len(steps) > 1 else ''} {told}"


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
