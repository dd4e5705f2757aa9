"""What the ranks of a run wrote down while they trained: which samples each was given, in every step that stands.

A start takes back the steps after its checkpoint. In exact mode each may be on another number of ranks: a step that
stands was done by the ranks of one start, and the lines of others about it say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from fourfold.data.schedule import BatchSchedule
from fourfold.record.reader import RunReader
from fourfold.record.starts import Start, Starts
from fourfold.spec.errors import DataError, Problem
from fourfold.spec.grid import Grid
from fourfold.verify.ledger import FILLER, NO_ROW, Ids, RankLedger


class Course(Starts):
    """Which ranks did each step that stands, and on which rows of its batch. Steps count from 1."""

    def __init__(
        self, starts: Sequence[Start], grid: Grid, at_degree: Callable[[int], BatchSchedule]
    ) -> None:
        """starts: as of `Starts`. grid: of the first. at_degree: the run's batches, cut over so many ranks."""
        super().__init__(starts)
        self._grid = grid
        self._at_degree = cache(at_degree)
        self.rows = cache(self._rows)

    def ids(self, rank: int, step: int) -> list[int]:
        """The samples that this rank is due to be given in a step that it took part in."""
        rows = self.rows(rank, self.world(step))
        return [*map(int, self._at_degree(self._grid.degree("dp")).ids([step - 1], rows)[0])]

    def _rows(self, rank: int, world: int) -> Ids:
        """Rows of a global batch that a rank of so many is given, in order of delivery: int64 [R]."""
        same = (
            world == self._grid.world
        )  # else a run in exact mode, in which each rank has samples of its own
        schedule = self._at_degree(self._grid.degree("dp") if same else world)
        share = self._grid.index(rank, "dp") if same else rank
        return np.concatenate([schedule.rows(share, micro) for micro in range(schedule.accumulation)])


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank wrote down.

    by_step: step from 1 -> sample ids, of those that stand; reached: steps that it has done, by its record and that
    of the others; ending: "finished", "stopped", or empty while it goes on, and where it died.
    """

    rank: int
    by_step: dict[int, list[int]]
    reached: int
    ending: str

    def ledger(self, course: Course, last: int) -> RankLedger:
        """The steps recorded up to `last`; where each id stands in the global batch is the schedule's arithmetic."""
        steps = min(self.reached, last) if self.rank < course.last.world else last
        kept: list[tuple[list[int], Ids]] = []
        for step in range(1, steps + 1):
            if step in self.by_step:
                kept.append((self.by_step[step], course.rows(self.rank, course.world(step))))
            elif self.rank >= course.world(step):
                kept.append(([], np.empty(0, np.int64)))
        width = max((len(rows) for _, rows in kept), default=0)
        placed = np.full((len(kept), width), FILLER, dtype=np.int64)
        at = np.full((len(kept), width), NO_ROW, dtype=np.int64)
        for index, (given, rows) in enumerate(kept):
            placed[index, : len(rows)], at[index, : len(rows)] = given, rows
        return RankLedger(self.rank, placed, at)


def read_records(
    reader: RunReader, grid: Grid, at_degree: Callable[[int], BatchSchedule]
) -> tuple[Course, list[Record]]:
    """The course of a run, and the record of every rank that did a step of it, or is to.

    grid: of its first start; the others are as at_degree.
    Raises DataError for lines that are not of such a run.
    """
    read = {rank: _read(reader, rank, grid.world) for rank in reader.ranks()}
    course = Course(next(iter(read.values())).starts if read else [Start(0, grid.world)], grid, at_degree)
    records = []
    for rank, found in read.items():
        if rank >= course.most:
            raise DataError(_strange(reader, rank, course, f"a record of rank {rank}"))
        if not (rank < course.last.world or course.left_after(rank)):
            continue  # of starts that came to nothing
        standing = {s: ids for s, (world, ids) in found.lines.items() if world == course.world(s)}
        widths = {
            len(ids) for s, ids in standing.items() if len(ids) != len(course.rows(rank, course.world(s)))
        }
        if widths:
            raise DataError(
                _strange(reader, rank, course, f"steps with {', '.join(map(str, sorted(widths)))}")
            )
        reached = course.left_after(rank)
        if rank < course.last.world:
            reached = max(found.starts[-1].began, max(standing, default=0), course.last.began)
        records.append(Record(rank, standing, reached, found.ending))
    return course, records


class _Found(NamedTuple):
    """starts: in order; lines: step -> (ranks of its start, sample ids)."""

    starts: list[Start]
    lines: dict[int, tuple[int, list[int]]]
    ending: str


def _read(reader: RunReader, rank: int, first_world: int) -> _Found:
    """The events of one rank; read once: a run that goes on writes more meanwhile."""
    starts, ending = [Start(0, first_world)], ""
    lines: dict[int, tuple[int, list[int]]] = {}
    for event in reader.events(rank):
        if event["kind"] in ("start", "end"):
            ending = event["ending"] if event["kind"] == "end" else ""
        if event["kind"] == "start":  # a resumed run takes back what came after its checkpoint
            starts.append(Start(event["step"], event.get("world", first_world)))
            lines = {step: one for step, one in lines.items() if step <= event["step"]}
        elif event["kind"] == "step":
            lines[event["step"]] = starts[-1].world, event["sample_ids"]
    return _Found(starts, lines, ending)


def lacking(records: Sequence[Record], course: Course, last: int) -> dict[int, list[int]]:
    """By rank the steps that it has done, or that were done without a record of it at all, and of which no line is."""
    known = {record.rank: record for record in records}
    found = {}
    for rank in range(max(start.world for start in course.starts)):
        record = known.get(rank, Record(rank, {}, last, ""))
        steps = [step for step in course.due(rank, min(record.reached, last)) if step not in record.by_step]
        if steps:
            found[rank] = steps
    return found


def not_as_due(records: Sequence[Record], course: Course, last: int) -> tuple[int, list[str]]:
    """How many lines up to `last` there are; and which of them have other samples than those due in them."""
    lines, wrong = 0, []
    for record in records:
        for step, ids in sorted(record.by_step.items()):
            if step <= last:
                lines += 1
                if ids != course.ids(record.rank, step):
                    wrong.append(f"rank {record.rank}, step {step}: other samples")
    return lines, wrong


def _strange(reader: RunReader, rank: int, course: Course, found: str) -> Problem:
    worlds = " or ".join(str(world) for world in dict.fromkeys(start.world for start in course.starts))
    width = " or ".join(
        str(len(course.rows(rank, start.world))) for start in course.starts if rank < start.world
    )
    return Problem(
        asked=f"{width or 'no'} sample ids in each step of rank {rank}",
        found=found,
        why=f"its Spec and its starts say {worlds} ranks, and so many samples on each",
        instead=f"ls -l {reader.dir.events_dir}",
    )
