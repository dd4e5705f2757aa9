"""Ranks of the tensor exercise that compute something else: planted in each before it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from fourfold.lab import tensor_ranks


def sums_are_means() -> None:
    """What should be added up is averaged."""
    keep = tensor_ranks._add
    tensor_ranks._add = lambda part: keep(part) / dist.get_world_size()


def slices_in_another_order() -> None:
    """Tokens are gathered with the last rank's first."""
    keep = tensor_ranks._gather

    def gather(own: Tensor) -> Tensor:
        return keep(own).flip(0)

    tensor_ranks._gather = gather


def mistakes_do_nothing() -> None:
    """Everything is done right, whatever mistake was asked for."""
    keep = tensor_ranks.layer

    def layer(sizes: Any, sequence: bool, _: str = "") -> Any:
        return keep(sizes, sequence)

    tensor_ranks.layer = layer
