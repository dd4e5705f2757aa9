"""The last collectives that each rank called, in a file that outlives it, and where ranks first differ in them.

A rank keeps its file mapped into memory; a call is one store into it, no system call. What aborts a process, such as
tensors of other shapes in one collective, cannot take it along.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fourfold.record.problems import unwritable
from fourfold.spec.errors import Problem
from fourfold.spec.value import Value
from fourfold.spec.words import counted

CALLS = "calls"  # the folder of these files in a run directory
SLOTS = 128  # calls that a file holds: the newest
# How many calls so far, how many in the group, unix seconds, the rest as text.
_SLOT = struct.Struct("<qqd488s")
_SEPARATOR = "\t"

# Of these every rank of a group has a tensor of the same shape; of the others (all-to-all by unequal splits, gather
# and scatter to and from one rank, messages) shapes are not compared.
_SAME_SHAPE = ("all_reduce", "all_gather", "allgather", "reduce_scatter", "broadcast", "reduce")
# One rank is another's opposite there: it may well stand in another line.
_ROOTED = (
    "broadcast",
    "gather",
    "scatter",
    "reduce",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
)


class Call(Value):
    """One collective that a rank called: the `number`th (from 1) of its group; count: of all of this rank's.

    group: torch's name of it; site: the lines that asked for it, outside torch, the innermost first; unit: of FSDP2's,
    if it is one's.
    """

    count: int
    group: str
    number: int
    op: str
    shape: str
    dtype: str
    site: str
    unit: str = ""
    time: float = 0.0

    @property
    def words(self) -> str:
        """all_reduce of [3, 4] float32 (blocks.1) at fourfold.train.step:80"""
        of = f" of {self.shape} {self.dtype}".rstrip() if self.shape else ""
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.op}{of}{unit}{f' at {self.site}' if self.site else ''}"


def what(call: Call) -> tuple[str, str, str]:
    """What must be the same on every rank of its group, for the collective to be one."""
    compared = call.op.startswith(_SAME_SHAPE)
    return call.op, *((call.shape, call.dtype) if compared else ("", ""))


def what_and_where(call: Call) -> tuple[str, ...]:
    """The same, and by whom it was called: of collectives of one shape in another order only that tells."""
    return *what(call), *(("", "") if call.op in _ROOTED else (call.site, call.unit))


class CallsFile:
    """This rank's own, `<directory>/rank<r>`."""

    def __init__(self, directory: Path | str, rank: int) -> None:
        """Make the file and the directory. DataError if that cannot be done (disk full, no permission)."""
        path = Path(directory) / f"rank{rank}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                bytes(SLOTS * _SLOT.size)
            )  # real bytes: a store into a hole on a full disk is a bus error
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), SLOTS * _SLOT.size)
        except OSError as error:
            raise unwritable(path, error, "keep a rank's last collectives", "nothing was lost") from error

    def write(self, count: int, number: int, time: float, text: bytes) -> None:
        """The `count`th call of this rank, the `number`th of its group. text: as `packed` gives it."""
        _SLOT.pack_into(self._memory, (count - 1) % SLOTS * _SLOT.size, count, number, time, text)

    def close(self) -> None:
        """Unmap the file; what is in it stays readable."""
        self._memory.close()


def packed(group: str, op: str, shape: str, dtype: str, site: str, unit: str) -> bytes:
    """What of a call is the same each time; cut where it is too long."""
    before = _SEPARATOR.join((group, op, shape[:80], dtype, unit[:80]))
    return f"{before}{_SEPARATOR}{site[:240]}".encode("ascii", "replace")


def read_calls(directory: Path | str) -> dict[int, tuple[Call, ...]]:
    """The last calls of every rank that has a file in this directory, the oldest first; other files are passed over."""
    found: dict[int, tuple[Call, ...]] = {}
    for path in Path(directory).glob("rank*"):
        with suppress(OSError, ValueError, struct.error):
            calls = [_unpacked(*slot) for slot in _SLOT.iter_unpack(path.read_bytes()) if slot[0]]
            found[int(path.name.removeprefix("rank"))] = tuple(sorted(calls, key=lambda call: call.count))
    return found


def _unpacked(count: int, number: int, time: float, text: bytes) -> Call:
    group, op, shape, dtype, unit, site = text.rstrip(b"\0").decode("ascii").split(_SEPARATOR)
    return Call(
        count=count,
        group=group,
        number=number,
        op=op,
        shape=shape,
        dtype=dtype,
        site=site,
        unit=unit,
        time=time,
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one group the first call that is not the same on all of its ranks: by rank, those of the fewest `odd`."""

    by_rank: Mapping[int, Call]
    odd: tuple[int, ...]

    def problem(self) -> Problem:
        """In four parts, with every rank's line."""
        call = next(iter(self.by_rank.values()))
        usual: dict[str, list[str]] = defaultdict(list)
        for rank, one in sorted(self.by_rank.items(), key=lambda item: item[0] not in self.odd):
            usual[one.words].append(str(rank))
        found = "; ".join(f"rank {', '.join(ranks)} called {words}" for words, ranks in usual.items())
        return Problem(
            asked=f"one collective on every rank of group {call.group}, as its call {call.number}",
            found=found,
            why="ranks pair collectives by their order alone: of other kinds or shapes they hang or abort, of one "
            "shape each takes the other's values, without an error",
            instead=f"the same calls in the same order on rank {', '.join(map(str, self.odd))}; look for a branch on "
            "the rank, or on its data, before that line",
        )


def first_difference(
    calls: Mapping[int, Sequence[Call]], by: Callable[[Call], tuple[str, ...]] = what
) -> Difference | None:
    """The earliest call, by the clock, in which ranks of one group differ; None where all that are known agree.

    calls: by rank, those that are known. by: what of a call must be the same.
    """
    met: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
    for rank, known in sorted(calls.items()):
        for call in known:
            if call.number:
                met[call.group, call.number][rank] = call
    found = []
    for by_rank in met.values():
        counts = Counter(by(call) for call in by_rank.values())
        if len(counts) > 1:
            usual = max(counts, key=lambda each: counts[each])  # of as many on both sides, the lowest rank's
            odd = tuple(sorted(rank for rank, call in by_rank.items() if by(call) != usual))
            found.append(Difference(by_rank, odd))
    return min(found, key=lambda each: min(call.time for call in each.by_rank.values()), default=None)


def told_of(calls: Mapping[int, Sequence[Call]]) -> str:
    """What the last calls of ranks say of how they came apart: the first difference, or who called fewer; may be ""."""
    if (difference := first_difference(calls)) is not None:
        return f"{difference.problem().asked}\n  found: {difference.problem().found}"
    last: dict[str, dict[int, Call]] = defaultdict(dict)
    for rank, known in calls.items():
        for call in known:
            if call.number:
                last[call.group][rank] = call
    for group, by_rank in sorted(last.items(), key=lambda item: -max(call.time for call in item[1].values())):
        most = max(call.number for call in by_rank.values())
        behind = {rank: call for rank, call in by_rank.items() if call.number < most}
        if behind and len(by_rank) > len(behind):
            ahead = {rank: call for rank, call in by_rank.items() if call.number == most}
            waits = next(iter(ahead.values()))
            lines = [
                f"rank {rank} has called {counted(call.number, 'collective')} of group {group}, the last {call.words}"
                for rank, call in sorted(behind.items())
            ]
            ranks = ", ".join(map(str, sorted(ahead)))
            return "; ".join(
                [*lines, f"rank {ranks} wait{'s' if len(ahead) == 1 else ''} in call {most}, {waits.words}"]
            )
    return ""
