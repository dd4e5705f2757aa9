"""The same mistakes in the product's own experts: does `verify equal` catch them, and say where?

Each is put in the place of the product's function, in ranks that end with the check.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.models import mixture
from fourfold.parallel.apply import Parallel
from fourfold.parallel.clip import local
from fourfold.parallel.expert_parallel import Spread
from fourfold.spec.load import load_spec
from fourfold.verify.equal import verify_equal

WORLD = 2
SETTINGS = (
    "data.sequence=32",
    "data.validation_fraction=0.0",
    "run.validate_every=0",
    "batch.global_batch=8",
    "batch.micro_batch=4",
    "optimizer.eps=1e-5",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "model.moe={experts=4, top_k=2, expert_width=16, balance_weight=0.3}",
    "layout.dp_shard=2",
    "layout.zero=2",
    "layout.ep=2",
)

_mixture: Any = mixture  # by names that may be assigned to
_parallel: Any = Parallel
_spread: Any = Spread


def at_the_gate(mistake: str, out: Path) -> dict[str, Any]:
    """The document of `verify equal` on a small decoder of experts that makes this mistake ("": none), one step."""
    setup = f"{__name__}:{mistake.replace('-', '_')}" if mistake else None
    return verify_equal(load_spec("moe-tiny", SETTINGS).spec, WORLD, steps=1, out=out, setup=setup)


def order_lost() -> None:
    """What experts made goes back in their own order, not in that in which it came."""
    back = Spread._back
    _spread._back = lambda self, places, *more: back(self, torch.arange(len(places)), *more)


def router_cut() -> None:
    """No gradient goes back through the weights."""
    choose = _mixture.chosen_experts

    def cut(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        scores, chosen, weights = choose(*given)
        return scores, chosen, weights.detach()

    _mixture.chosen_experts = cut


def experts_counted_again() -> None:
    """Gradients of experts, which hold the tokens of every rank of the group already, are scaled again."""
    finish = Parallel.finish

    def scaled(self: Parallel) -> None:
        finish(self)
        for parameter in self.network.parameters():
            spread = isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())
            if spread and parameter.grad is not None:
                local(parameter.grad).mul_(self.grid.ep)

    _parallel.finish = scaled


def auxiliary_of_the_batch() -> None:
    """How often experts are chosen is counted over a microbatch, not over each row."""
    count = _mixture.counted

    def together(chosen: Tensor, live: Tensor | None, experts: int) -> Tensor:
        counts: Tensor = count(chosen, live, experts)
        return counts if live is None else counts.sum(0, keepdim=True).expand_as(counts) // len(counts)

    _mixture.counted = together


def auxiliary_by_ranks() -> None:
    """The auxiliary loss is averaged over ranks, of which each has a part of the sum."""
    carry = _mixture.carried
    _mixture.carried = lambda x, loss, *more: carry(x, loss / dist.get_world_size(), *more)
