"""Further kinds of faults of tensor parallel, sequence parallel and ties, planted in a rank."""
# ruff: noqa: ARG001, ARG004, ARG005 - a stand-in has the parameters of what it replaces

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fourfold.models import decoder
from fourfold.models.initial import Linear
from fourfold.models.protocol import Heads, LossModule
from fourfold.parallel import tensor_parallel
from fourfold.parallel.clip import GradientNorm, local
from fourfold.parallel.data_parallel import Alone
from fourfold.parallel.mesh import sub_mesh
from fourfold.parallel.sharded import Sharded
from fourfold.train import setup
from fourfold.train.meter import Meter


def metrics_of_every_peer() -> None:
    """Every tensor-parallel rank adds its samples to the metrics, though all of them have the same."""
    made = Meter.__init__
    Meter.__init__ = lambda self, lines, counts=True: made(self, lines, True)


def targets_shifted_in_each_slice() -> None:
    """Targets are shifted inside each slice of the sequence: at its end stands the slice's own first."""
    loss = decoder.cross_entropy

    def shifted(logits: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        half = targets.shape[1] // 2
        targets = targets.clone()
        targets[:, half - 1] = targets[:, 0]
        return loss(logits, targets, valid)

    decoder.cross_entropy = shifted


def doubled_by_a_group_of_one() -> None:
    """Gradients are added to themselves after each microbatch: a reduction over a group that has one member."""

    @contextmanager
    def doubling(self: Alone, last: bool) -> Iterator[None]:
        yield
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(2)

    Alone.microbatch = doubling


def bias_shared_out_between_ranks() -> None:
    """A row's bias is divided by the ranks and summed with the outputs; its gradient is divided with it."""

    def forward(self: Any, x: Any) -> Any:
        weight = self.weight
        if self.bias is None or not isinstance(weight, DTensor) or weight.placements != (Shard(1),):
            return F.linear(x, weight, self.bias)
        share = self.bias.to_local(grad_placements=[Replicate()]) / weight.device_mesh.size()
        own = F.linear(x, weight).to_local(grad_placements=[Replicate()]) + share
        return DTensor.from_local(own, weight.device_mesh, [Partial()], run_check=False)

    Linear.forward = forward


class _Summed(torch.autograd.Function):
    """Whole in forward; in backward the sum of what every rank computed of the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def backward_sums_equal_losses() -> None:
    """Every tensor-parallel rank computes all of the loss, and backward adds the gradients of all of them up."""
    forward = LossModule.forward

    def gathered(self: Any, batch: Any) -> Any:
        total, count = forward(self, batch)
        return _Summed.apply(total), count

    LossModule.forward = gathered


def compared_in_place() -> None:
    """To compare what ranks hold in common, the norm sums it over them in place: the caller's gradients are the sum."""
    norm = GradientNorm.__call__

    def found(self: Any, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        result = norm(self, parameters, device)
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements == (Replicate(),):
                dist.all_reduce(local(gradient))
        return result

    GradientNorm.__call__ = found


def summed_over_another_group() -> None:
    """Gradients are summed over the tensor-parallel ranks in place of the replicas: as many, with other parts."""
    wrap = Sharded._wrap

    def crossed(self: Sharded, unit: Any, grid: Any, device: torch.device) -> None:
        group = sub_mesh(grid, device.type, "tp").get_group()
        with patch.object(DeviceMesh, "get_group", lambda *_: group):
            wrap(self, unit, grid, device)

    Sharded._wrap = crossed


def untied_when_filled() -> None:
    """Memory is given to the embedding and to the head: their tie is lost, though they begin alike."""
    fill = setup.fill_boxes

    def filled(module: LossModule, *more: Any) -> None:
        fill(module, *more)
        network: Any = module.module
        network.head.weight = nn.Parameter(network.embedding.weight.detach().clone())

    setup.fill_boxes = filled


def tie_reduced_before_its_second_use() -> None:
    """The gradient of a tied weight is that of one of its uses."""
    forward = Linear.forward

    def used(self: Any, x: Any) -> Any:
        return F.linear(x, self.weight.detach()) if self.out_features == 256 else forward(self, x)

    Linear.forward = used


def units_remembered_from_another_module() -> None:
    """How outputs are shared out is remembered by the number of ranks: key and value get what query got."""
    remembered: dict[int, Callable[[DTensor], Tensor]] = {}

    def own(_joined: Any, _rule: Heads, cut: Any) -> Callable[[DTensor], Tensor]:
        return remembered.setdefault(
            cut.ranks, lambda y: y.to_local()
        )  # the first is query, whose heads divide

    tensor_parallel._own_units = own
