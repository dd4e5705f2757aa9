"""What ranks tell each other around a save or a load, and an error of one of them as the error of all."""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fourfold.spec.errors import DataError, FourfoldError, Problem


def rank_here() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_here() -> int:
    """How many ranks there are; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_json(value: Any) -> list[Any]:
    """`value` of every rank, by rank, as JSON has it.

    Collectives: two all-gathers on the default group; none in a world of one.
    """
    data = json.dumps(value).encode()
    if world_here() == 1:
        return [json.loads(data)]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_here())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, mine)
    return [json.loads(part.numpy().tobytes()) for part in parts]


@contextmanager
def as_one(asked: str) -> Iterator[None]:
    """Around a call into torch's checkpointing: what any rank raised in it is raised on every rank, as our error.

    torch gathers the errors of its steps itself, and raises a class that is no Exception. DataError if all of them
    are of files; the first other error of ours, or a FourfoldError with the traceback, if not. A rank that died is
    no such error: the collective's own comes out as it is.
    """
    try:
        with warnings.catch_warnings():
            # Of a single process torch assumes what is meant here, and says so.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        raise _ours(asked, error) from error


def _ours(asked: str, error: CheckpointException) -> FourfoldError:
    problems: dict[Problem, str] = {}  # each once, with the first rank that told of it
    kind: type[FourfoldError] = DataError
    for rank, (raised, stack) in sorted(error.failures.items()):
        where = f"rank {rank}" if world_here() > 1 else ""
        if isinstance(raised, FourfoldError):
            told = raised.problems
            kind = type(raised) if kind is DataError else kind
        elif isinstance(raised, OSError):
            told = (Problem(asked, raised.strerror or str(raised), "the system refused it", ""),)
        else:
            told = (Problem(asked, repr(raised), "".join(traceback.format_list(stack)).rstrip(), ""),)
            kind = FourfoldError if kind is DataError else kind
        for problem in told:
            problems.setdefault(problem, where)
    return kind(
        [replace(each, where=", ".join(filter(None, (at, each.where)))) for each, at in problems.items()]
    )
