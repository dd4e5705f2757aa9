"""Draws on tensors that are cut between ranks; what their tests run there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

from fourfold.models.boxes import box_of
from fourfold.models.draws import Draws
from fourfold.parallel.mesh import sub_mesh
from fourfold.spec.grid import Grid

SHAPE = (3, 5, 6)


def _cut(x: torch.Tensor, dim: int | None) -> DTensor:
    mesh = sub_mesh(Grid(tp=dist.get_world_size()), "cpu", "tp")
    placement: Placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(x, mesh, [placement])  # of equal tensors on all ranks


def dropout_of_boxes(dims: list[int | None], shape: tuple[int, ...], p: float) -> list[bool]:
    """For each dim: whether dropout of the tensor cut there, and its gradient, are this rank's part of the whole's."""
    draws = Draws(7, 3, torch.arange(10, 10 + shape[0]))
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    held = []
    for dim in dims:
        x = whole.clone().requires_grad_()
        expected = draws.dropout(x, p, "a")
        expected.square().sum().backward()
        own = _cut(whole, dim).requires_grad_()
        found = draws.dropout(own, p, "a")
        assert isinstance(found, DTensor)
        found.square().sum().backward()
        part = box_of(found).slices
        assert x.grad is not None and isinstance(own.grad, DTensor), "both were differentiated"
        held.append(
            found.placements == own.placements
            and torch.equal(found.to_local(), expected[part])
            and torch.equal(own.grad.to_local(), x.grad[part])
        )
    return held


def recomputed(dim: int | None) -> bool:
    """Whether a gradient through dropout that is computed again in backward has the bits of the one that is not."""
    draws = Draws(7, 3, torch.arange(SHAPE[0]))
    gradients = []
    for again in (False, True):
        x = _cut(torch.ones(SHAPE, dtype=torch.float64), dim).requires_grad_()

        def run(y: Any) -> Any:
            return draws.dropout(draws.dropout(y, 0.4, "a").sin(), 0.3, "b").square()

        (checkpoint(run, x, use_reentrant=False) if again else run(x)).sum().backward()
        assert isinstance(x.grad, DTensor), "it was differentiated"
        gradients.append(x.grad.to_local())
    return torch.equal(*gradients)
