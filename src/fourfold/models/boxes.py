"""Which box of a tensor this rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fourfold.collectives.rehearsed import with_values
from fourfold.spec.boxes import Box, shard_range


def box_of(tensor: DTensor) -> Box:
    """The box of `tensor` that this rank holds; one that is not cut, or a sum of parts, is whole."""
    return box_in(tensor.shape, tensor.device_mesh, tensor.placements)


def box_in(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
    """The same of a tensor of `shape` with one placement for each dim of `mesh`."""
    if torch.compiler.is_compiling() and mesh.ndim == 1:
        return _cut_once(shape, mesh, placements[0])
    with with_values():  # torch looks its numbers up in tensors
        size, offset = compute_local_shape_and_global_offset([*shape], mesh, placements)
    return Box(tuple(offset), tuple(size))


def _cut_once(shape: Sequence[int], mesh: DeviceMesh, placement: Placement) -> Box:
    """The same by arithmetic alone, which becomes a part of compiled code as it is."""
    size, offset = [*shape], [0] * len(shape)
    if isinstance(placement, Shard):
        at = placement.dim
        offset[at], size[at] = shard_range(shape[at], mesh.size(), mesh.get_local_rank())
    return Box(tuple(offset), tuple(size))


def cut_dim(placement: Placement) -> int | None:
    """The dim that it cuts; None if none. torch's `is_shard` says no to FSDP2's cut of what is cut already."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None
