"""What the tests of fingerprints run in ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fourfold.collectives.fingerprints import Fingerprints
from fourfold.spec.errors import CheckFailed


def total(value: float) -> float:
    tensor = torch.full((3,), value)
    dist.all_reduce(tensor)
    return float(tensor[0])


def swapped(odd: int, by_helper: bool) -> str:
    """Two sums of one shape; rank `odd` has them in the other order. What the second look says."""
    rank = dist.get_rank()
    calls = Fingerprints()
    with calls.kept():
        total(1.0)
        calls.compare(1)
        ones = torch.ones(3)

        def first() -> None:
            total(1.0) if by_helper else dist.all_reduce(ones)

        def second() -> None:
            total(2.0) if by_helper else dist.all_reduce(ones)

        for one in (second, first) if rank == odd else (first, second):
            one()
        try:
            calls.compare(2)
        except CheckFailed as error:
            return str(error)
    return ""


def units_swapped(odd: int) -> str:
    """Two blocks of one shape under FSDP2, of which rank `odd` gathers the second first."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(2)]
    root = nn.Sequential(*blocks)
    fully_shard(root, mesh=mesh)
    calls = Fingerprints()
    with calls.kept():
        root(torch.ones(1, 4)).sum().backward()
        calls.compare(1)
        for block in blocks[:: -1 if dist.get_rank() == odd else 1]:
            block.reshard()
            block.unshard()
        try:
            calls.compare(2)
        except CheckFailed as error:
            return str(error)
    return ""


def of_every_sort() -> tuple[int, list[str]]:
    """Collectives of a mesh, by functions of several kinds: how many are noted, and what two looks say (nothing)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    plain = dist.all_reduce
    calls = Fingerprints()
    with calls.kept():
        whole = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        assert whole.to_local().shape == (2 * world, 2)
        functional.all_reduce(torch.ones(2), "sum", (mesh, 0)).sum()
        objects: list[object] = [None] * world
        dist.all_gather_object(objects, rank)
        if rank == 0:
            dist.broadcast(torch.ones(3), 0)
            dist.send(torch.ones(1), 1)
        else:
            dist.broadcast(torch.zeros(3), 0)
            if rank == 1:
                dist.recv(torch.ones(1), 0)
        dist.all_to_all_single(
            torch.empty(world * (rank + 1)), torch.empty(sum(range(1, world + 1))),
            [rank + 1] * world, list(range(1, world + 1)),
        )  # fmt: skip
        alone = [dist.new_group([each]) for each in range(world)][rank]
        dist.all_reduce(torch.ones(rank + 1), group=alone)
        calls.compare(1)
        calls.compare(2)
    assert dist.all_reduce is plain, "nothing stays in its place"
    return calls.count, [call.__name__ for call in (dist.all_reduce, dist.barrier)]
