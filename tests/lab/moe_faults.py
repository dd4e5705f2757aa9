"""Ranks of the experts' exercise that compute something else: planted in each before it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fourfold.lab import moe_ranks
from fourfold.models import mixture
from fourfold.parallel.balance import Balance


def sums_are_means() -> None:
    """What should be added up is averaged."""
    keep = moe_ranks.added
    moe_ranks.added = lambda part, group=None: keep(part, group) / dist.get_world_size()


def copies_go_their_own_ways() -> None:
    """Gradients of experts are not added over those ranks that hold copies."""
    keep = moe_ranks.added
    moe_ranks.added = lambda part, group=None: keep(part) if group is None else part


def tokens_in_another_order() -> None:
    """What came is taken for what the last rank sent first."""
    keep = moe_ranks.exchange
    moe_ranks.exchange = lambda *given, **more: keep(*given, **more).flip(0)


def mistakes_do_nothing() -> None:
    """Everything is done right, whatever mistake was asked for."""
    keep = moe_ranks.layer

    def layer(sizes: Any, capacity: float | None = None, _: str = "") -> Any:
        return keep(sizes, capacity)

    moe_ranks.layer = layer


def rows_and_balance() -> None:
    """Nothing is dropped; the product's auxiliary loss is lost, and each rank corrects by its own load."""
    keep, carry = moe_ranks.fits, mixture.carried

    def fits(chosen: Tensor, sizes: Any, _: float | None) -> Any:
        return keep(chosen, sizes, None)

    def alone(self: Balance) -> None:
        for module in self.modules:
            module.rebalance(module.load)
        self.begin()

    moe_ranks.fits = fits
    mixture.carried = lambda x, loss, *more: carry(x, 0 * loss, *more)
    Balance.update = alone
