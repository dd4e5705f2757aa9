"""Sums of a few host numbers over the world, on the CPU group: no device is made to wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist

from fourfold.collectives.rehearsed import with_values


@dataclass(slots=True)
class PendingSum:
    """A sum under way; `wait` gives the numbers, the same on every rank."""

    _values: torch.Tensor
    _work: dist.Work | None

    def wait(self) -> list[int]:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return [int(value) for value in self._values.tolist()]


def start_sum(values: Sequence[int]) -> PendingSum:
    """Begin summing integers over the world (one asynchronous all-reduce of int64 on the CPU)."""
    with with_values():
        tensor = torch.tensor(values, dtype=torch.int64)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return PendingSum(tensor, None)
        return PendingSum(tensor, dist.all_reduce(tensor, async_op=True))


def sum_exactly(values: Sequence[Sequence[float]]) -> list[float]:
    """Of each entry the sum of all its numbers over all ranks, rounded once: in whatever order they come.

    Collectives: one all-gather of objects on the default group.
    """
    own = [_exact(entry) for entry in values]
    gathered = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own)
    return [_rounded(parts) for parts in zip(*gathered, strict=True)]


def _exact(numbers: Sequence[float]) -> Fraction | float:
    """As a fraction, which no sum rounds; where one is not finite, that."""
    total = sum(numbers)
    return sum(map(Fraction, numbers), Fraction()) if math.isfinite(total) else total


def _rounded(parts: Sequence[Fraction | float]) -> float:
    broken = [part for part in parts if isinstance(part, float)]
    return sum(broken) if broken else float(sum(parts, Fraction()))


def sum_floats(values: torch.Tensor) -> torch.Tensor:
    """Sum an fp64 tensor over the world (one all-reduce on the CPU); returns it on the CPU."""
    total = values.detach().to(device="cpu", dtype=torch.float64, copy=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total
