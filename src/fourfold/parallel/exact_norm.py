"""The global gradient norm, the same bits on any number of data-parallel ranks: exact mode.

Of each row of each gradient (its last dim) the squares are summed in fp64 by halving; data parallel cuts between rows
only. The sums of all rows, in the order of the model, are halved in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from fourfold.models.boxes import box_of
from fourfold.parallel.clip import local


@torch.no_grad()
def exact_norm(parameters: Sequence[Parameter], device: torch.device, speaks: bool) -> Tensor:
    """0-dim, fp64, on the device, not read. 0 without any gradient.

    speaks: whether this rank is in the first of the replicas that hold the same shards.
    Collectives: if any gradient is cut, one all-reduce over the world of a number for each row, to which only one rank
    adds more than 0: in any order that is exact.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    shapes = [_rows(gradient.shape) for gradient in gradients]
    counts = [math.prod(shape) for shape in shapes]
    sums = torch.zeros(sum(counts), dtype=torch.float64, device=device)
    cut = False
    for gradient, shape, of_all in zip(gradients, shapes, torch.split(sums, counts), strict=True):
        own, place = local(gradient), of_all.view(shape)
        if isinstance(gradient, DTensor):
            cut, place = True, _own_rows(gradient, place)
        if own.numel() and (speaks or not isinstance(gradient, DTensor)):
            squares = own.to(torch.float64, copy=True).square_().reshape(place.numel(), -1)
            place.copy_(halved(squares).view(place.shape))
    if cut:
        dist.all_reduce(sums)
    return halved(sums[None])[0].sqrt()


def _rows(shape: Sequence[int]) -> Sequence[int]:
    """All but the last dim; of a vector each element is a row."""
    return shape if len(shape) < 2 else shape[:-1]


def _own_rows(gradient: DTensor, sums: Tensor) -> Tensor:
    """Where the sums of this rank's rows stand."""
    box = box_of(gradient)
    assert gradient.ndim < 2 or box.size[-1] in (0, gradient.shape[-1]), "FSDP2 cuts dim 0, or `stack_dim`"
    for dim in range(sums.ndim):
        sums = sums.narrow(dim, box.offset[dim], box.size[dim])
    return sums


def halved(values: Tensor) -> Tensor:
    """Sums over the rows of `values` [N, M], which are used up: the second half is added to the first, and so on."""
    width = values.shape[1]
    if width == 0:
        return values.new_zeros(values.shape[0])
    while width > 1:
        half = (width + 1) // 2
        values[:, : width - half] += values[:, half:width]
        width = half
    return values[:, 0]
