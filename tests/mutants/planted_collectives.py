"""Ranks that call other collectives than their peers: another order, none, another shape, another operation.

All are planted in gradients of replicas that are summed one by one, after the last backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.parallel.apply import Parallel

put: Any = setattr
Reduce = Callable[[list[Tensor]], None]


def _summed_by(own: Reduce) -> None:
    """In place of DDP's buckets: rank 0 sums gradient after gradient, rank 1 does what `own` does."""
    microbatch, finish = Parallel.microbatch, Parallel.finish

    def finished(self: Parallel) -> None:
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        (_in_order if dist.get_rank() == 0 else own)(gradients)
        for gradient in gradients:
            gradient /= dist.get_world_size()
        finish(self)

    put(Parallel, "microbatch", lambda self, last: microbatch(self, False))  # noqa: ARG005
    put(Parallel, "finish", finished)


def _in_order(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient)


def _twins(gradients: list[Tensor]) -> tuple[int, int]:
    """Two of one shape."""
    shapes = [gradient.shape for gradient in gradients]
    first = next(at for at, shape in enumerate(shapes) if shapes.count(shape) > 1)
    return first, shapes.index(shapes[first], first + 1)


def swapped() -> None:
    """Rank 1 sums two gradients of one shape in the other order."""

    def own(gradients: list[Tensor]) -> None:
        one, two = _twins(gradients)
        turned = list(gradients)
        turned[one], turned[two] = turned[two], turned[one]
        _in_order(turned)

    _summed_by(own)


def missed() -> None:
    """Rank 1 leaves the last sum of a step out."""
    _summed_by(lambda gradients: _in_order(gradients[:-1]))


def of_another_shape() -> None:
    """Rank 1 sums half of the largest gradient."""

    def own(gradients: list[Tensor]) -> None:
        largest = max(gradients, key=Tensor.numel)
        _in_order([g if g is not largest else g.view(-1)[: g.numel() // 2] for g in gradients])

    _summed_by(own)


def of_another_kind() -> None:
    """Rank 1 asks for the maximum where the others ask for the sum, of one gradient."""

    def own(gradients: list[Tensor]) -> None:
        dist.all_reduce(gradients[0], dist.ReduceOp.MAX)
        _in_order(gradients[1:])

    _summed_by(own)


def of_another_dtype() -> None:
    """Rank 1 sends one gradient in a dtype of half the width."""

    def own(gradients: list[Tensor]) -> None:
        half = torch.float32 if gradients[0].dtype == torch.float64 else torch.bfloat16
        narrow = gradients[0].to(half)
        dist.all_reduce(narrow)
        gradients[0].copy_(narrow)
        _in_order(gradients[1:])

    _summed_by(own)
