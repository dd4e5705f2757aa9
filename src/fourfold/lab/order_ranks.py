"""What the ranks of the order exercise do: a few collectives, in which the last rank makes a mistake of order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from fourfold.collectives.fingerprints import Fingerprints
from fourfold.collectives.watchdog import Place, Watchdog
from fourfold.launch.failure import describe
from fourfold.record.calls import CALLS, CallsFile
from fourfold.record.writer import write_text
from fourfold.spec.errors import FourfoldError

ROWS = 3


class Came(NamedTuple):
    """What came of it on one rank: the sums it has, or what an error said; after how many seconds."""

    sums: tuple[float, ...]
    error: str
    seconds: float


def act(mistake: str, watched: bool, folder: Path, timeout_s: float) -> Came:
    """Make the mistake; a rank that is ended by its watchdog leaves a file `told<rank>` in `folder`.

    watched: by fingerprints and watchdog; else as torch does it alone. timeout_s: of every collective.
    Collectives: three all-reduces, and what the mistake adds, on the default group and one more of all ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    other = dist.new_group(list(range(world)), timeout=timedelta(seconds=timeout_s))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
    dist.barrier()
    since = time.perf_counter()

    def end(error: FourfoldError) -> None:
        write_text(folder / f"told{rank}", f"{time.perf_counter() - since:.3f}\n{error}")
        os._exit(error.exit_code)

    calls = Fingerprints(CallsFile(folder / CALLS, rank))
    store = dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(rank, world, store, timeout_s, calls, lambda: Place(1, mistake, 0), end)
    sums: tuple[float, ...] = ()
    error = ""
    try:
        if watched:
            with calls.kept(), watchdog.watching():
                sums = MISTAKES[mistake](rank == world - 1, timeout_s, other)
                calls.compare(1)
        else:
            sums = MISTAKES[mistake](rank == world - 1, timeout_s, other)
    except Exception as raised:  # whatever torch says is what is shown
        error = describe(raised)
    return Came(sums, error, time.perf_counter() - since)


def _sum(value: float, rows: int = ROWS, group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.full((rows,), value)
    dist.all_reduce(tensor, group=group)
    return float(tensor[0])


def nothing(last: bool, timeout_s: float, other: dist.ProcessGroup) -> tuple[float, ...]:
    """No mistake; one rank takes a third of the time that the others would wait."""
    first = _sum(1.0)
    if last:
        time.sleep(timeout_s / 3)
    return first, _sum(10.0), _sum(100.0, group=other)


def enters_late(last: bool, timeout_s: float, other: dist.ProcessGroup) -> tuple[float, ...]:
    """It comes to the second sum after the others have given up."""
    first = _sum(1.0)
    if last:
        time.sleep(2 * timeout_s)
    return first, _sum(10.0), _sum(100.0, group=other)


def leaves_early(last: bool, timeout_s: float, other: dist.ProcessGroup) -> tuple[float, ...]:  # noqa: ARG001
    """It has done one step less, and ends in good order."""
    first = _sum(1.0)
    if last:
        os._exit(0)
    return first, _sum(10.0), _sum(100.0, group=other)


def another_operation(last: bool, timeout_s: float, other: dist.ProcessGroup) -> tuple[float, ...]:  # noqa: ARG001
    """It gathers first and sums then."""
    own = torch.ones(ROWS)
    parts = [torch.empty(ROWS) for _ in range(dist.get_world_size())]
    if last:
        dist.all_gather(parts, own)
        return (_sum(1.0),)
    first = _sum(1.0)
    dist.all_gather(parts, own)
    return (first,)


def another_order(last: bool, timeout_s: float, other: dist.ProcessGroup) -> tuple[float, ...]:  # noqa: ARG001
    """It sums the second of two tensors of one shape first."""
    first, second = torch.full((ROWS,), 1.0), torch.full((ROWS,), 10.0)
    if last:
        dist.all_reduce(second)
        dist.all_reduce(first)
    else:
        dist.all_reduce(first)
        dist.all_reduce(second)
    return float(first[0]), float(second[0])


def another_shape(last: bool, timeout_s: float, other: dist.ProcessGroup) -> tuple[float, ...]:  # noqa: ARG001
    """It sums a tensor of more rows."""
    return _sum(1.0), _sum(10.0, rows=ROWS + 1000 * last)


def another_group_first(last: bool, timeout_s: float, other: dist.ProcessGroup) -> tuple[float, ...]:  # noqa: ARG001
    """It sums in the second group first."""
    if last:
        return _sum(10.0, group=other), _sum(1.0)
    return _sum(1.0), _sum(10.0, group=other)


def all_receive(last: bool, timeout_s: float, other: dist.ProcessGroup) -> tuple[float, ...]:  # noqa: ARG001
    """Two neighbours wait for a message of one another before they send their own."""
    rank = dist.get_rank()
    received = torch.empty(ROWS)
    if rank < 2:
        dist.recv(received, 1 - rank)
        dist.send(torch.ones(ROWS), 1 - rank)
    return (_sum(1.0),)


MISTAKES: dict[str, Callable[[bool, float, dist.ProcessGroup], tuple[float, ...]]] = {
    function.__name__: function
    for function in (
        *(nothing, enters_late, leaves_early, another_operation, another_order),
        *(another_shape, another_group_first, all_receive),
    )
}
