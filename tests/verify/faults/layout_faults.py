"""Classic mistakes in sharding, planted in a rank by replacing the product's functions by name."""
# ruff: noqa: ARG001, ARG005 - a stand-in has the parameters of what it replaces

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fourfold.models.draws import Draws
from fourfold.models.initial import Linear
from fourfold.models.protocol import Heads, LossModule
from fourfold.parallel import apply, initial, tensor_parallel
from fourfold.parallel.clip import GradientNorm, local
from fourfold.parallel.sharded import Sharded
from fourfold.train import step
from fourfold.train.setup import Training


def norm_gradients_not_summed() -> None:
    """Sequence parallel: each rank keeps the gradient of the norms that its slice of the tokens gives."""

    def keep(network: nn.Module) -> None:
        for parameter in network.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and gradient.placements == (Partial(),):
                parameter.grad = DTensor.from_local(
                    gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False
                )

    apply.sum_partial = keep


def replicated_counted_tp_times() -> None:
    """The norm takes the square of what is whole on every tensor-parallel rank once for each."""
    GradientNorm._counts = lambda self, gradient, own: True


def shard_left_out_of_the_norm() -> None:
    """Each rank's norm is that of its own shards."""

    def own(self: Any, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        held = [local(p.grad) for p in parameters if p.grad is not None]
        return torch.stack(torch._foreach_norm(held)).square().sum().sqrt()

    GradientNorm.__call__ = own


def dropout_by_place_in_the_slice() -> None:
    """Sequence parallel: the mask belongs to the token's place in this rank's slice."""

    def own(self: Any, x: DTensor, name: str, levels: int) -> Tensor:
        held = x.to_local()
        kept = held * self._kept(name, levels, held.shape) * (65536 / (65536 - levels))
        return DTensor.from_local(
            kept, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )

    Draws._dropout_of_box = own


def kv_gradient_not_summed() -> None:
    """A key head that two ranks hold gets the gradient of one rank's queries alone."""
    units = tensor_parallel._own_units

    def own(joined: Any, rule: Heads, cut: Any) -> Any:
        if rule.units % cut.ranks == 0:
            return units(joined, rule, cut)
        mine = cut.mesh.get_local_rank() * rule.units // cut.ranks
        return lambda y: y.to_local().narrow(
            -1, mine * (y.shape[-1] // rule.units), y.shape[-1] // rule.units
        )

    tensor_parallel._own_units = own


def averaged_not_summed() -> None:
    """FSDP's own division by the number of ranks is left on."""
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None


def not_synced_at_last() -> None:
    """Every microbatch is taken for one before the last: no gradient is ever reduced."""
    microbatch = Sharded.microbatch
    Sharded.microbatch = lambda self, last: microbatch(self, False)


def replicas_not_reduced() -> None:
    """HSDP: shards are reduced among the shard ranks, never between the replicas."""
    reduce = FSDPModule.set_requires_all_reduce
    FSDPModule.set_requires_all_reduce = lambda self, needed, **more: reduce(self, False, **more)


def loss_of_every_peer() -> None:
    """The loss is summed over tensor-parallel ranks, though each has all of it."""
    forward = LossModule.forward

    def summed(self: Any, batch: Any) -> Any:
        total, count = forward(self, batch)
        return total * dist.get_world_size(), count

    LossModule.forward = summed


def targets_of_every_peer() -> None:
    """The denominator counts every tensor-parallel rank's targets."""

    def agreed(training: Training, batches: Any, stop_requested: bool, *more: bool) -> Any:
        count = sum(batch.valid_count() for batch in batches)
        return step.PendingTotals(step.start_sum([count, int(stop_requested), 0]))

    step.agree_totals = agreed


def bias_of_every_peer() -> None:
    """A row's bias is added on every rank before its outputs are summed."""

    def forward(self: Any, x: Any) -> Any:
        y = F.linear(x, self.weight, self.bias)
        weight = self.weight
        if self.bias is not None and isinstance(weight, DTensor) and weight.placements == (Shard(1),):
            y = y.redistribute(weight.device_mesh, [Replicate()]) + self.bias * (
                weight.device_mesh.size() - 1
            )
        return y

    Linear.forward = forward


def unused_left_at_zero() -> None:
    """What took part on no rank keeps the zeros that FSDP gives it, and AdamW moves it."""
    Sharded.finish = lambda self: None


def not_clipped_on_rank_1() -> None:
    """Rank 1 tells the norm and scales nothing."""
    clip = step.clip

    def clipped(training: Training) -> Tensor:
        held = {p: local(p.grad).clone() for p in training.model.parameters() if p.grad is not None}
        norm = clip(training)
        for p, gradient in held.items() if dist.get_rank() == 1 else ():
            local(p.grad).copy_(gradient)
        return norm

    step.clip = clipped


def rows_of_other_ranks_looked_up() -> None:
    """Vocabulary parallel: a token of another rank is looked up, too, as this rank's first."""

    def look_up(module: Any, cut: Any, tokens: Tensor) -> DTensor:
        weight = module.weight
        rows = weight.to_local().shape[0]
        start = cut.mesh.get_local_rank() * rows
        at = tokens - start
        found = F.embedding(at.masked_fill((at < 0) | (at >= rows), 0), weight.to_local())
        return cut.stream(DTensor.from_local(found, cut.mesh, [Partial()], run_check=False))

    tensor_parallel._look_up = look_up


def every_shard_starts_alike() -> None:
    """Initial values are drawn by the place in the shard."""
    values = initial.initial_values
    initial.initial_values = lambda seed, name, start, shape, *_: values(seed, name, start, shape)


def one_shard_does_not_decay() -> None:
    """Rank 1's optimizer has no weight decay."""
    from fourfold.train import setup

    build = setup.Optimizer

    def built(parameters: Any, spec: Any, *more: Any, **named: Any) -> Any:
        if dist.get_rank() == 1:
            spec = spec.model_copy(update={"weight_decay": 0.0})
        return build(parameters, spec, *more, **named)

    setup.Optimizer = built
