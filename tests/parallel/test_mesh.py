"""Groups of a mesh wait as long as the run's own group, not as long as torch would have them wait."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from fourfold.parallel.mesh import mesh_of
from fourfold.spec.grid import Grid
from fourfold.spec.training import LayoutSpec


def waits() -> list[timedelta]:
    grid = Grid.of(LayoutSpec(dp_replicate=1, dp_shard=2, tp=2, zero=1))
    mesh, device = mesh_of(grid, "cpu"), torch.device("cpu")
    groups = [dist.distributed_c10d._get_default_group(), *mesh.get_all_groups()]
    return [group._get_backend(device).options._timeout for group in groups]


def test_every_group_has_the_timeout_of_the_run(ranks):
    for found in ranks(4).run(waits):
        assert set(found) == {timedelta(seconds=60)}  # of the pool
        assert len(found) == 5
