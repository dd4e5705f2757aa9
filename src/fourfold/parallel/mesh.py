"""The ranks as a torch DeviceMesh with the axes of `spec.grid`.

The ranks over which a state is sharded, dp_shard × cp, are one dim of it, "fsdp"; "cp" is a part of that.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fourfold.collectives.rehearsed import with_values
from fourfold.spec.grid import Grid

DIMS = ("pp", "dp_replicate", "fsdp", "tp")
EXPERT_DIMS = ("epp", "edp_replicate", "efsdp", "ep")


@lru_cache(
    maxsize=8
)  # groups are made once in a process: torch's caches would point at those that were destroyed
def mesh_of(grid: Grid, device_type: str) -> DeviceMesh:
    """All ranks of the default group, with the dims `DIMS`, outermost first.

    Collectives: the first call for a grid makes its process groups, on every rank.
    """
    mesh = init_device_mesh(device_type, tuple(grid.degree(axis) for axis in DIMS), mesh_dim_names=DIMS)
    _settle(mesh)
    return mesh


@lru_cache(maxsize=8)
def _context_mesh(grid: Grid, device_type: str) -> DeviceMesh:
    """The same with "dp_shard" and "cp" in place of "fsdp". Collectives: as above."""
    axes = ("dp_shard", "cp")
    mesh = mesh_of(grid, device_type)._unflatten("fsdp", tuple(grid.degree(axis) for axis in axes), axes)
    _settle(mesh)
    return mesh


@lru_cache(maxsize=8)
def _copies_mesh(grid: Grid, device_type: str) -> DeviceMesh:
    """All ranks that hold the same where nothing is sharded: dp_replicate × cp as one dim. Collectives: as above."""
    mesh = mesh_of(grid, device_type)["dp_replicate", "fsdp"]._flatten("copies")
    _settle(mesh)
    return mesh


@lru_cache(maxsize=8)
def _experts_mesh(grid: Grid, device_type: str) -> DeviceMesh:
    """All ranks, cut otherwise: by which experts they hold, and how often these are held. Collectives: as above."""
    degrees = (grid.pp, grid.dp_replicate, grid.degree("efsdp"), grid.ep)
    mesh = init_device_mesh(device_type, degrees, mesh_dim_names=EXPERT_DIMS)
    _settle(mesh)
    return mesh


@lru_cache(maxsize=8)
def _expert_copies_mesh(grid: Grid, device_type: str) -> DeviceMesh:
    """All ranks that hold the same experts, as one dim. Collectives: as above."""
    mesh = _experts_mesh(grid, device_type)["edp_replicate", "efsdp"]._flatten("edp")
    _settle(mesh)
    return mesh


def _settle(mesh: DeviceMesh) -> None:
    """Have the groups of `mesh` wait as long as the default group does; torch would give them 10 or 30 minutes."""
    for group in mesh.get_all_groups():
        _wait_as_the_world(group, mesh.device_type)


def _wait_as_the_world(group: dist.ProcessGroup, device_type: str) -> None:
    if dist.get_backend() == "fake":
        return  # nobody is waited for
    world = dist.distributed_c10d._get_default_group()
    # torch has no public name for it.
    dist.distributed_c10d._set_pg_timeout(
        world._get_backend(torch.device(device_type)).options._timeout, group
    )


def sub_mesh(grid: Grid, device_type: str, *axes: str) -> DeviceMesh:
    """The part of the mesh along `axes` that this rank is in.

    Of `DIMS`, or "cp", or "copies" (dp_replicate × cp); or of `EXPERT_DIMS`, or "edp" (edp_replicate × efsdp).
    """
    with with_values():
        if axes == ("cp",):
            return _context_mesh(grid, device_type)["cp"]
        if axes == ("copies",) and grid.dp_replicate > 1 and grid.cp > 1:
            return _copies_mesh(grid, device_type)
        if axes == ("edp",) and grid.dp_replicate > 1 and grid.degree("efsdp") > 1:
            return _expert_copies_mesh(grid, device_type)
        if axes == ("edp",):
            axes = ("efsdp",) if grid.dp_replicate == 1 else ("edp_replicate",)
        if axes[0] in EXPERT_DIMS:
            return _experts_mesh(grid, device_type)[axes]
        if axes == ("copies",):
            axes = ("fsdp",) if grid.cp > 1 else ("dp_replicate",)
        return mesh_of(grid, device_type)[axes]


@lru_cache(maxsize=8)
def stage_group(grid: Grid, device_type: str) -> dist.ProcessGroup | None:
    """The ranks that hold the same stages as this one; None: all of them do. Collectives: as `mesh_of`."""
    if grid.pp == 1:
        return None
    mesh = mesh_of(grid, device_type)["dp_replicate", "fsdp", "tp"]._flatten("stage")
    _settle(mesh)
    return mesh.get_group()


@lru_cache(maxsize=8)
def ends_group(grid: Grid, device_type: str) -> dist.ProcessGroup | None:
    """This rank's group of the first and the last rank of "pp"; None where it is neither. Collectives: as `mesh_of`."""
    pairs = [[ranks[0], ranks[-1]] for ranks in grid.groups("pp")]
    group, _ = dist.new_subgroups_by_enumeration(pairs)  # type: ignore[no-untyped-call]
    mine: dist.ProcessGroup | None = group
    if mine is not None:
        _wait_as_the_world(mine, device_type)
    return mine
