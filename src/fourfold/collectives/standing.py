"""Where ranks stand when nothing moves, and what follows from that: who differs, who is late, who waits for whom."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]  # torch's stubs lack it

from fourfold.collectives.fingerprints import Fingerprints, asked_from, lines_of
from fourfold.record.calls import Call, first_difference
from fourfold.spec.errors import Problem
from fourfold.spec.value import Value
from fourfold.spec.words import counted


class Standing(Value):
    """One rank that has done nothing for a while.

    mark: changes when it does anything. line: where its main thread is, outside torch. waiting_s: for how long the
    oldest collective that is not done has been under way; 0.0: none is. entered, done: collectives of each group so
    far; groups: the ranks of each. noted: its last calls from Python, with their lines; recorded: the last of all, also
    of DDP's, as torch's flight recorder has them. receives, sends: the ranks from or to which it waits to get through
    with a message.
    """

    rank: int
    mark: str
    step: int
    phase: str
    line: str
    waiting_s: float
    entered: dict[str, int]
    done: dict[str, int]
    groups: dict[str, tuple[int, ...]]
    noted: tuple[Call, ...]
    recorded: tuple[Call, ...]
    receives: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """rank 1 at step 3 (forward), in model:20 in forward"""
        at = f"at step {self.step} ({self.phase})" if self.step else f"before step 1 ({self.phase})"
        return f"rank {self.rank} stands {at} in {self.line}"


class Verdict(NamedTuple):
    """What standing still comes to. final: it cannot end well, however long one waits.

    late: the ranks that the `waiting` ones wait for, or those that called something else; in a circle all are both.
    """

    problem: Problem
    final: bool
    late: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


def counts() -> tuple[dict[str, int], dict[str, int]]:
    """Collectives entered and done so far, by group, those from C++ too; cheap. Needs TORCH_FR_BUFFER_SIZE > 0."""
    status = pickle.loads(_dump_fr_trace(includeCollectives=False)).get("pg_status", {})
    entered = {name: max(one["last_enqueued_collective"], 0) for name, one in status.items()}
    return entered, {name: max(one["last_completed_collective"], 0) for name, one in status.items()}


def standing(
    rank: int, mark: str, step: int, phase: str, still_s: float, fingerprints: Fingerprints
) -> Standing:
    """Where this process stands, and has stood for `still_s`, asked from another thread. Collectives: none."""
    entries = pickle.loads(_dump_fr_trace(includeStackTraces=False)).get("entries", ())
    entered, done = counts()
    under_way = [entry["time_created_ns"] / 1e9 for entry in entries if not entry["retired"]]
    receives, sends = fingerprints.receives, fingerprints.sends
    waits_s = [time.time() - min(under_way, default=time.time()), still_s if receives or sends else 0.0]
    return Standing(
        rank=rank,
        mark=mark,
        step=step,
        phase=phase,
        line=main_line(),
        waiting_s=max(*waits_s, 0.0),
        entered=entered,
        done=done,
        groups={name: _members(name) for name in entered},
        noted=fingerprints.recent(),
        recorded=tuple(_as_call(entry) for entry in entries),
        receives=receives,
        sends=sends,
    )


def main_line() -> str:
    """Where the main thread is: the innermost lines outside torch."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "no line of Python" if frame is None else lines_of(asked_from(frame)[0])


def _members(name: str) -> tuple[int, ...]:
    world = dist.distributed_c10d._world
    return next(
        (tuple(dist.get_process_group_ranks(g)) for g, own in world.pg_names.items() if own == name), ()
    )


def _as_call(entry: Mapping[str, Any]) -> Call:
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    return Call(
        count=entry["record_id"] + 1,
        group=entry["process_group"][0],
        number=0 if entry["is_p2p"] else entry["collective_seq_id"],
        op=entry["profiling_name"].rpartition(":")[2],
        shape=" and ".join(str(one) for one in sizes),
        dtype=" and ".join(sorted({str(one).lower() for one in dtypes})),
        site="",
        time=entry["time_created_ns"] / 1e9,
    )


def verdict(standings: Mapping[int, Standing], world: int) -> Verdict | None:
    """What can be said of the ranks that stand still; None: nothing yet. standings: by rank, fresh."""
    difference = first_difference({rank: one.noted for rank, one in standings.items()}) or first_difference(
        {rank: one.recorded for rank, one in standings.items()}
    )
    if difference is not None:
        told = difference.problem()
        lines = "; ".join(standings[rank].words for rank in sorted(difference.by_rank))
        return Verdict(
            Problem(told.asked, f"{told.found}; {lines}", told.why, told.instead), True, difference.odd
        )
    waits = {
        rank: for_whom for rank, one in standings.items() if (for_whom := _waits_for(one, standings, world))
    }
    if not waits:
        return None
    late = tuple(sorted({other for others in waits.values() for other in others} - waits.keys()))
    waiting = tuple(sorted(waits))
    if late:
        return Verdict(_late(late, waits, standings), False, late, waiting)
    lines = "; ".join(
        f"{standings[rank].words}, and waits for rank {', '.join(map(str, sorted(waits[rank])))}"
        for rank in waiting
    )
    return Verdict(
        Problem(
            asked="collectives in one order on every rank",
            found=lines,
            why="each of them waits for another in another group, or for a message: none can go on",
            instead="the same order of groups and messages on all of these ranks, at these lines",
        ),
        True,
        waiting,
        waiting,
    )


def _waits_for(one: Standing, standings: Mapping[int, Standing], world: int) -> set[int]:
    """The ranks that have not come to where this one waits."""
    found = {
        other
        for mine, its in (("receives", "sends"), ("sends", "receives"))
        for other in getattr(one, mine)
        if other < world and (other not in standings or one.rank not in getattr(standings[other], its))
    }
    for group, members in one.groups.items():
        number = one.entered.get(group, 0)
        if number > one.done.get(group, 0):
            found |= {
                other
                for other in members
                if other != one.rank
                and (other not in standings or standings[other].entered.get(group, 0) < number)
            }
    return found


def _late(late: Sequence[int], waits: Mapping[int, set[int]], standings: Mapping[int, Standing]) -> Problem:
    by_late: dict[int, list[int]] = defaultdict(list)
    for rank, others in sorted(waits.items()):
        for other in sorted(others & set(late)):
            by_late[other].append(rank)
    where = [
        standings[rank].words
        if rank in standings
        else f"rank {rank} is at work elsewhere, or says nothing at all"
        for rank in late
    ]
    waiting = [f"{standings[rank].words}, since {standings[rank].waiting_s:.0f} s" for rank in sorted(waits)]
    for_it = "; ".join(
        f"rank {', '.join(map(str, ranks))} for rank {rank}" for rank, ranks in sorted(by_late.items())
    )
    return Problem(
        asked=f"every rank in the collective that {counted(len(waits), 'rank')} wait{'s' * (len(waits) == 1)} in",
        found=f"{'; '.join(where)}; waiting: {for_it}: {'; '.join(waiting)}",
        why="no rank leaves a collective before all of its group have come",
        instead="look at what the late rank does at that line which the others do not, or give it more time: "
        "--set run.timeout_s=SECONDS",
    )
