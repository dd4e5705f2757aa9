"""The global gradient norm over any mix of meshes: each element counts once, whoever holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from fourfold.models.boxes import cut_dim
from fourfold.spec.grid import AXES, PRODUCTS, Grid


class Shared(Protocol):
    """What knows the parameters that another stage of a pipeline holds too, and counts (`tied.Tied`)."""

    def elsewhere(self) -> Sequence[Parameter]: ...


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # then it is only looked up; a DTensor's own detach goes through its dispatch
            tensor = tensor.to_local()
    return tensor.detach()


def as_cut(value: Tensor, like: Tensor) -> Tensor:
    """A plain tensor of what this rank holds of `like`, as a tensor cut in the same way; the memory is shared."""
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class GradientNorm:
    """L2 norm of all gradients together, as one device has it, the same on every rank."""

    def __init__(self, grid: Grid, rank: int, tied: Shared | None = None) -> None:
        """tied: parameters that the first stage of a pipeline shares with the last, if either is here."""
        self._place = grid.coordinate(rank) | {"efsdp": grid.index(rank, "efsdp")}
        self._staged, self._tied = grid.pp > 1, tied

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Parameter], device: torch.device) -> Tensor:
        """0-dim, fp64 on the CPU and in fp64, else fp32; on the device, not read. 0 without any gradient.

        A gradient counts on the ranks that stand at 0 on every axis that does not cut it: replicated and tied ones
        once. On the others it counts nothing, which is nan of what is not finite: so that shows wherever it is. A stage
        of a pipeline holds parameters of its own.
        Collectives: one all-reduce of one number over the world, if any gradient is cut.
        """
        held = [(p, p.grad) for p in parameters if p.grad is not None]
        gradients = [gradient for _, gradient in held]
        cut = self._staged or any(isinstance(p, DTensor) for p in parameters)
        # fp64 is slow on most devices.
        wide = device.type == "cpu" or any(g.dtype is torch.float64 for g in gradients)
        total = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
        if gradients:
            squares = torch.stack(torch._foreach_norm([local(g) for g in gradients])).to(total.dtype).square()
            if cut:
                elsewhere = {id(p) for p in self._tied.elsewhere()} if self._tied is not None else set()
                counting = [float(self._counts(g, self._staged and id(p) not in elsewhere)) for p, g in held]
                squares *= torch.tensor(counting, device=device)
            total += squares.sum()
        if cut:
            dist.all_reduce(total)
        return total.sqrt()

    def _counts(self, gradient: Tensor, own: bool) -> bool:
        """own: whether no other stage has its parameter."""
        cutting: set[str] = {"pp"} if own else set()
        if isinstance(gradient, DTensor):
            assert not any(p.is_partial() for p in gradient.placements), "parallel.finish() has reduced them"
            names = gradient.device_mesh.mesh_dim_names or ()
            dims = [n for n, p in zip(names, gradient.placements, strict=True) if cut_dim(p) is not None]
            cutting |= {axis for dim in dims for axis in PRODUCTS.get(dim, (dim,))}
        if "ep" in cutting:  # dp_shard, cp and tp together are efsdp and ep
            return all(
                self._place[axis] == 0 for axis in ("pp", "dp_replicate", "efsdp") if axis not in cutting
            )
        return all(self._place[axis] == 0 for axis in AXES if axis not in cutting)


@torch.no_grad()
def scale(parameters: Sequence[Parameter], factor: Tensor) -> None:
    """Multiply every gradient in place. Collectives: none."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0]))
