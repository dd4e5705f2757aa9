"""The ranks as a torch DeviceMesh with the axes of `spec.grid`."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fourfold.spec.grid import AXES, Grid


@lru_cache(
    maxsize=8
)  # groups are made once in a process: torch's caches would point at those that were destroyed
def mesh_of(grid: Grid, device_type: str) -> DeviceMesh:
    """All ranks of the default group, one dim for each axis of `AXES`, outermost first.

    Its groups wait for a collective as long as the default group does; torch would give them 10 or 30 minutes.
    Collectives: the first call for a grid makes its process groups, on every rank.
    """
    mesh = init_device_mesh(device_type, tuple(grid.degree(axis) for axis in AXES), mesh_dim_names=AXES)
    if dist.get_backend() == "fake":
        return mesh  # nobody is waited for
    world, device = dist.distributed_c10d._get_default_group(), torch.device(device_type)
    for group in mesh.get_all_groups():
        # torch has no public name for it.
        dist.distributed_c10d._set_pg_timeout(world._get_backend(device).options._timeout, group)
    return mesh


def sub_mesh(grid: Grid, device_type: str, *axes: str) -> DeviceMesh:
    """The part of the mesh along `axes` that this rank is in."""
    return mesh_of(grid, device_type)[axes]
