"""What the tests of this room run in ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fourfold.collectives.agree import agree
from fourfold.collectives.sums import start_sum, sum_floats
from fourfold.spec.errors import CheckFailed


def agree_on(value: str) -> None:
    agree({"a": value})


def disagree() -> str:
    try:
        agree({"a": str(dist.get_rank() // (dist.get_world_size() - 1))})
    except CheckFailed as error:
        return str(error)
    return ""


def disagree_loudly() -> None:
    agree({"initial parameters": str(dist.get_rank())})


def sum_of_ranks() -> tuple[list[int], list[float], list[float]]:
    rank = dist.get_rank()
    pending = start_sum([rank + 1, 2**40 + rank])
    mine = torch.tensor([0.5 + rank, float("nan") if rank == 1 else 1.0], dtype=torch.float64)
    return pending.wait(), sum_floats(mine).tolist(), mine.tolist()
