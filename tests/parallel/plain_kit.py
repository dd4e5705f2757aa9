"""A network as a kit, for tests: its forward takes the batch apart and gives (sum, count)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.models.protocol import Rule


class PlainKit:
    """`make()` as a ModelKit, whole on every rank. names: of its blocks."""

    def __init__(self, make: Callable[[], nn.Module], names: tuple[str, ...] = ()) -> None:
        self._make = make
        self._names = names

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:  # noqa: ARG002
        return self._make()

    def loss(self, module: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = module(*batch)
        return total, count

    def sharding(self) -> dict[str, Rule]:
        return {"*": "replicate"}

    def blocks(self, module: nn.Module) -> tuple[str, ...]:  # noqa: ARG002
        return self._names
