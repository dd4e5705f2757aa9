"""What the tests of this room run in ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fourfold.collectives import tree
from fourfold.collectives.agree import agree
from fourfold.collectives.sums import start_sum, sum_exactly, sum_floats
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


def tensors_of_ranks(world):
    """What each rank holds; 13 elements divide between no two ranks."""
    draws = torch.Generator().manual_seed(5)
    return list(torch.randn(world, 13, generator=draws) * 10 ** torch.randn(world, 13, generator=draws))


def summed_in_order():
    """An all-reduce, and a reduce-scatter of the first 12 elements."""
    own = tensors_of_ranks(dist.get_world_size())[dist.get_rank()]
    whole = own.clone()
    tree.all_reduce(whole, None)
    chunk = torch.empty(12 // dist.get_world_size())
    tree.reduce_scatter(chunk, own[:12].clone(), None)
    return whole, chunk


def summed_exactly():
    """1e16 on one rank and -1e16 on the other."""
    sign = 1.0 - 2.0 * dist.get_rank()
    return sum_exactly([[sign * 1e16, 0.5], [1.0 + dist.get_rank()]])
