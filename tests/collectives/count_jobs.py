"""What the tests of counting run in two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fourfold.collectives.count import Collectives, Seen

_MESHES: list[DeviceMesh] = []


def _mesh() -> DeviceMesh:
    if not _MESHES:  # once in a process
        _MESHES.append(init_device_mesh("cpu", (dist.get_world_size(),)))
    return _MESHES[0]


def _backward() -> None:
    x = torch.ones(10, requires_grad=True)
    x.register_hook(lambda gradient: (dist.all_reduce(gradient), gradient)[1])
    x.exp().sum().backward()


def counted(job: str, each: int = 1) -> dict[Seen, int]:
    """What is seen of `job`."""
    six, four, eight = torch.ones(6), torch.ones(4), torch.ones(8)
    group = dist.group.WORLD
    assert group is not None
    mesh = _mesh()
    other = 1 - dist.get_rank()

    def functionals() -> None:
        functional.all_reduce(six, "sum", group).sum()
        functional.all_gather_tensor(six, 0, group).sum()

    jobs = {
        "all_reduce": lambda: (dist.all_reduce(six), dist.all_reduce(six, async_op=True).wait()),
        "all_gather": lambda: (
            dist.all_gather([torch.empty(6), torch.empty(6)], six),
            dist.all_gather_into_tensor(torch.empty(12), six),
        ),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(four, eight),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(8), eight),
        "broadcast": lambda: dist.broadcast(six, 0),
        "barrier": dist.barrier,
        "functional": functionals,
        "dtensor": lambda: (
            DTensor.from_local(eight, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local().sum()
        ),
        "backward": _backward,
        "nothing": lambda: six + 1,
        "send": lambda: dist.send(six, other) if dist.get_rank() == 0 else dist.recv(six, other),
    }
    with Collectives() as seen:
        seen.each = each
        jobs[job]()
    return dict(seen.found)
