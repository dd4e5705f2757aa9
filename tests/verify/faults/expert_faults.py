"""Mistakes of mixtures of experts, planted in a rank by replacing the product's functions by name."""
# ruff: noqa: ARG001 - a stand-in has the parameters of what it replaces

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.lab.moe_product import auxiliary_by_ranks  # noqa: F401  # what the exercise plants, too
from fourfold.lab.moe_product import auxiliary_of_the_batch as auxiliary_of_the_microbatch  # noqa: F401
from fourfold.lab.moe_product import experts_counted_again as experts_counted_ep_times  # noqa: F401
from fourfold.lab.moe_product import order_lost as tokens_returned_elsewhere  # noqa: F401
from fourfold.lab.moe_product import router_cut as router_gradient_lost  # noqa: F401
from fourfold.models import mixture
from fourfold.models.carried import loss_elsewhere
from fourfold.models.mixture import Routed
from fourfold.parallel import apply, pipeline
from fourfold.parallel.balance import Balance
from fourfold.parallel.clip import GradientNorm
from fourfold.parallel.pipeline import Part, Pipeline
from fourfold.parallel.stream_experts import CutExperts


def norm_of_some_experts() -> None:
    """The norm leaves out the experts that lie on other ranks than the first of each group."""
    counts = GradientNorm._counts

    def first(self: GradientNorm, gradient: Tensor, own: bool) -> bool:
        spread = isinstance(gradient, DTensor) and "ep" in (gradient.device_mesh.mesh_dim_names or ())
        return counts(self, gradient, own) and not (spread and gradient.device_mesh.get_local_rank("ep"))

    GradientNorm._counts = first


def auxiliary_lost() -> None:
    """B065: the auxiliary loss is computed, and what it rides on is thrown away."""
    mixture.carried = lambda x, *_: x


def auxiliary_of_every_peer() -> None:
    """Tensor-parallel ranks route the same tokens, and each adds their auxiliary loss."""
    made = CutExperts.__init__

    def speaking(self: CutExperts, cut: Any) -> None:
        made(self, cut)
        self.__dict__["_adds"], self.speaks = self.speaks, True

    CutExperts.__init__ = speaking
    CutExperts.once = lambda self, parameter: self.own(parameter) * int(self._adds)


def capacity_of_the_tokens_here() -> None:
    """Context parallel: each rank lets its own tokens take the room that a whole row has."""

    def fits(self: Routed, chosen: Tensor, live: Tensor, every: Any, rows: Any) -> Tensor:
        limits = mixture.capacities(live.sum(1), self.moe)
        return mixture.fitting(chosen, self.here.part(rows.live_here), limits, self.moe.experts)

    Routed._fits = fits


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
