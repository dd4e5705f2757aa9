"""The same mistakes in the product's own tensor parallel: does `verify equal` catch them, and say where?

Each is put in the place of the product's function, in ranks that end with the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fourfold.models.initial import Linear
from fourfold.parallel import apply
from fourfold.spec.load import load_spec
from fourfold.verify.equal import verify_equal

SETTINGS = (
    "data.sequence=32",
    "data.validation_fraction=0.0",
    "run.validate_every=0",
    "batch.global_batch=8",
    "batch.micro_batch=4",
    "optimizer.eps=1e-5",
    "model.layers=2",
)

_linear: Any = Linear  # by names that may be assigned to
_apply: Any = apply


def settings_of(mistake: str, world: int) -> Sequence[str]:
    """What the Spec `tiny` is set to, so that a mistake can show on so many ranks."""
    sequence = mistake == "no-sum-of-slices"
    return (*SETTINGS, f"layout.tp={world}", *(("layout.sp=true",) if sequence else ()))


def at_the_gate(mistake: str, world: int, out: Path) -> dict[str, Any]:
    """The document of `verify equal` on a small decoder whose ranks make this mistake ("": none), over one step."""
    setup = f"{__name__}:{mistake.replace('-', '_')}" if mistake else None
    spec = load_spec("tiny", settings_of(mistake, world)).spec
    return verify_equal(spec, world, steps=1, adverse=True, out=out, setup=setup)


def no_sum_forward() -> None:
    """A row's outputs are taken for whole: nobody adds them up."""

    def forward(self: Linear, x: Any) -> Any:
        weight = self.weight
        if not _is(weight, Shard(1)):
            return F.linear(x, weight, self.bias)
        share: Any = F.linear(x, weight)
        y = _as_whole(share.to_local(grad_placements=[Replicate()]), weight)
        return y if self.bias is None else y + self.bias

    _linear.forward = forward


def no_sum_backward() -> None:
    """What a column gives back is taken for whole: nobody adds it up."""

    def forward(self: Linear, x: Any) -> Any:
        weight = self.weight
        if _is(weight, Shard(0)) and x.requires_grad:
            x = x.view_as(x)  # its own gradient, before it is added to others'
            x.register_hook(lambda gradient: _as_whole(gradient.to_local(), weight))
        return F.linear(x, weight, self.bias)

    _linear.forward = forward


def bias_on_every_rank() -> None:
    """A row's bias counts once for each rank."""

    def forward(self: Linear, x: Any) -> Any:
        y: Any = F.linear(x, self.weight, self.bias)
        weight = self.weight
        if self.bias is None or not _is(weight, Shard(1)):
            return y
        assert isinstance(weight, DTensor), "it is cut"
        mesh = weight.device_mesh
        return y.redistribute(mesh, [Replicate()]) + self.bias * (mesh.size() - 1)

    _linear.forward = forward


def no_sum_of_slices() -> None:
    """A gradient of one rank's tokens is taken for that of all."""

    def keep(network: nn.Module) -> None:
        for parameter in network.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements == (Partial(),):
                parameter.grad = _as_whole(gradient.to_local(), gradient)

    _apply.sum_partial = keep


def _is(weight: Tensor, placement: Shard) -> bool:
    return isinstance(weight, DTensor) and weight.placements == (placement,)


def _as_whole(share: Tensor, like: Tensor) -> DTensor:
    assert isinstance(like, DTensor), "it is on the ranks' mesh"
    return DTensor.from_local(share, like.device_mesh, [Replicate()], run_check=False)
