"""Mistakes of mixtures of experts, planted in a rank by replacing the product's functions by name."""
# ruff: noqa: ARG001 - a stand-in has the parameters of what it replaces

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.models import mixture
from fourfold.models.carried import loss_elsewhere
from fourfold.models.mixture import Routed
from fourfold.parallel import apply, pipeline
from fourfold.parallel.apply import Parallel
from fourfold.parallel.balance import Balance
from fourfold.parallel.clip import GradientNorm, local
from fourfold.parallel.expert_parallel import Spread
from fourfold.parallel.pipeline import Part, Pipeline
from fourfold.parallel.stream_experts import CutExperts


def experts_counted_ep_times() -> None:
    """B068: gradients of experts, which hold the tokens of every rank of the group already, are scaled by ep again."""
    finish = Parallel.finish

    def scaled(self: Parallel) -> None:
        finish(self)
        for parameter in self.network.parameters():
            spread = isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
            if spread and parameter.grad is not None:
                local(parameter.grad).mul_(self.grid.ep)

    Parallel.finish = scaled


def norm_of_some_experts() -> None:
    """The norm leaves out the experts that lie on other ranks than the first of each group."""
    counts = GradientNorm._counts

    def first(self: GradientNorm, gradient: Tensor, own: bool) -> bool:
        spread = isinstance(gradient, DTensor) and "ep" in (gradient.device_mesh.mesh_dim_names or ())
        return counts(self, gradient, own) and not (spread and gradient.device_mesh.get_local_rank("ep"))

    GradientNorm._counts = first


def router_gradient_lost() -> None:
    """B067: what experts made is weighted by the router's scores, and no gradient goes back through the weights."""
    choose = mixture.chosen_experts

    def cut(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        scores, chosen, weights = choose(*given)
        return scores, chosen, weights.detach()

    mixture.chosen_experts = cut


def auxiliary_lost() -> None:
    """B065: the auxiliary loss is computed, and what it rides on is thrown away."""
    mixture.carried = lambda x, *_: x


def auxiliary_by_ranks() -> None:
    """B065: the auxiliary loss is averaged over ranks, of which each has a part of the sum."""
    carry = mixture.carried
    mixture.carried = lambda x, loss, *more: carry(x, loss / dist.get_world_size(), *more)


def auxiliary_of_every_peer() -> None:
    """Tensor-parallel ranks route the same tokens, and each adds their auxiliary loss."""
    made = CutExperts.__init__

    def speaking(self: CutExperts, cut: Any) -> None:
        made(self, cut)
        self.__dict__["_adds"], self.speaks = self.speaks, True

    CutExperts.__init__ = speaking
    CutExperts.once = lambda self, parameter: self.own(parameter) * int(self._adds)


def auxiliary_of_the_microbatch() -> None:
    """How often experts are chosen is counted over a microbatch, not over each row."""
    count = mixture.counted

    def together(chosen: Tensor, live: Tensor | None, experts: int) -> Tensor:
        counts = count(chosen, live, experts)
        return counts if live is None else counts.sum(0, keepdim=True).expand_as(counts) // len(counts)

    mixture.counted = together


def capacity_of_the_tokens_here() -> None:
    """Context parallel: each rank lets its own tokens take the room that a whole row has."""

    def fits(self: Routed, chosen: Tensor, live: Tensor, every: Any, rows: Any) -> Tensor:
        limits = mixture.capacities(live.sum(1), self.moe)
        return mixture.fitting(chosen, self.here.part(rows.live_here), limits, self.moe.experts)

    Routed._fits = fits


def tokens_returned_elsewhere() -> None:
    """What experts made goes back in their own order, not in that in which it came."""
    back = Spread._back
    Spread._back = lambda self, places, *more: back(self, torch.arange(len(places)), *more)


def load_of_one_rank() -> None:
    """Each rank moves its corrections by the load of its own tokens."""

    def alone(self: Balance) -> None:
        for module in self.modules:
            if module.load is not None:
                module.rebalance(module.load)
        self.begin()

    Balance.update = alone


def stages_without_the_factor() -> None:
    """The auxiliary loss of a stage that has no loss is added as it is: with 1 in the place of 1 / count."""
    pipeline.loss_elsewhere = lambda _: loss_elsewhere(lambda: 1.0)


def factor_by_microbatches() -> None:
    """It has the factor of a mean over microbatches, which the loss has not."""

    def divided(self: Pipeline, part: Part) -> Any:
        step = self._step
        return loss_elsewhere(lambda: step.factor() / len(step.batches))

    Pipeline._loss_of = divided


def auxiliary_of_the_last_stage_alone() -> None:
    """Stages without the loss leave the auxiliary loss out."""
    pipeline.loss_elsewhere = lambda _: loss_elsewhere(lambda: 0.0)


def load_of_own_tokens_in_a_stage() -> None:
    """Ranks that have the same stages do not sum their loads: each has a group of its own."""
    made = apply.Balance
    apply.Balance = lambda network, _: made(network, _alone())


def _alone() -> dist.ProcessGroup:
    own, _ = dist.new_subgroups_by_enumeration([[rank] for rank in range(dist.get_world_size())])
    return own
