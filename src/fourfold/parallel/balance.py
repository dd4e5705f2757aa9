"""Routers balanced by a correction of their scores: moved once a step, by the load of the whole global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@runtime_checkable
class Balanced(Protocol):
    """A module with such a correction. load: of the backwards since it was last looked at, int64 [experts]."""

    correction: Tensor | None
    load: Tensor | None

    def rebalance(self, load: Tensor) -> None:
        """Move the correction by the load of all tokens of a step."""


class Balance:
    """The corrections of what one rank has of a network, the same on every rank that has it."""

    def __init__(self, network: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """group: the ranks that have the same of it; None: all have all."""
        self._group = group
        modules = (module for module in network.modules() if isinstance(module, Balanced))
        self.modules: Sequence[Balanced] = [module for module in modules if module.correction is not None]

    def begin(self) -> None:
        """A step begins: what was counted before it (in a warm-up) is forgotten."""
        for module in self.modules:
            module.load = None

    def update(self) -> None:
        """After a step that updates: move every correction.

        Collectives: one all-reduce of an integer for each expert of each layer here, if there are any: over the ranks
        that have the same stages of a pipeline, or over the world.
        """
        if not self.modules:
            return
        loads = [
            torch.zeros_like(_correction(module), dtype=torch.int64) if module.load is None else module.load
            for module in self.modules
        ]
        total = torch.cat(loads)
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            dist.all_reduce(total, group=self._group)
        for module, load in zip(self.modules, torch.split(total, [len(load) for load in loads]), strict=True):
            module.rebalance(load)
        self.begin()


def correction_names(network: nn.Module) -> list[str]:
    """The buffers that are corrections."""
    held = {id(module.correction) for module in Balance(network).modules}
    return [name for name, buffer in network.named_buffers() if id(buffer) in held]


def corrections(network: nn.Module) -> int:
    """How many corrections there are in all; `plan.parameters` counts them."""
    return sum(len(_correction(module)) for module in Balance(network).modules)


def _correction(module: Balanced) -> Tensor:
    assert module.correction is not None, "it is balanced by one"
    return module.correction
