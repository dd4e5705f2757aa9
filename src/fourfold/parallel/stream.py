"""What runs between modules under tensor parallel: one tensor, the same on all ranks or cut over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fourfold.parallel.trail import Trail


@dataclass(slots=True)
class Cut:
    """How modules are joined: over which ranks, and what the stream between them is.

    last: what was made whole last, as it was then, and what became of it. Several modules take the same (query, key
    and value): one gathering serves them in forward, and one sum of their gradients in backward.
    """

    mesh: DeviceMesh
    sequence: bool
    last: tuple[Tensor, tuple[int, bool], DTensor] | None = None
    trail: Trail = field(init=False)

    def __post_init__(self) -> None:
        self.trail = Trail(self.ranks, self.sequence, self.forget)

    @property
    def ranks(self) -> int:
        return self.mesh.size()

    def stream(self, x: DTensor) -> DTensor:
        """`x` [..., T, F] as the stream has it: T cut between the ranks, or all of it on each."""
        placement: Placement = Shard(x.ndim - 2) if self.sequence and x.ndim > 1 else Replicate()
        return x.redistribute(self.mesh, [placement])

    def whole(self, x: Tensor) -> DTensor:
        """`x`, all of it on each rank; a plain tensor is the same on all of them."""
        if torch.compiler.is_compiling():
            return self._made(x)  # what is kept would become an output of the code
        state = (x._version, torch.is_grad_enabled())
        if self.last is not None and self.last[0] is x and self.last[1] == state:
            return self.last[2]
        made = self._made(x)
        self.last = (x, state, made)
        return made

    def _made(self, x: Tensor) -> DTensor:
        if isinstance(x, DTensor):
            return x.redistribute(self.mesh, [Replicate()])
        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)

    def forget(self) -> None:
        """Hold nothing of a forward that has ended."""
        self.last = None
