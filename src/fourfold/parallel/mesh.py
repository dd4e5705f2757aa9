"""The ranks as a torch DeviceMesh with the axes of `spec.grid`."""

from __future__ import annotations

from functools import lru_cache

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fourfold.spec.grid import AXES, Grid


@lru_cache(
    maxsize=8
)  # groups are made once in a process: torch's caches would point at those that were destroyed
def mesh_of(grid: Grid, device_type: str) -> DeviceMesh:
    """All ranks of the default group, one dim for each axis of `AXES`, outermost first.

    Collectives: the first call for a grid makes its process groups, on every rank.
    """
    return init_device_mesh(device_type, tuple(grid.degree(axis) for axis in AXES), mesh_dim_names=AXES)


def sub_mesh(grid: Grid, device_type: str, *axes: str) -> DeviceMesh:
    """The part of the mesh along `axes` that this rank is in."""
    return mesh_of(grid, device_type)[axes]
