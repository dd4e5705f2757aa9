"""Under FSDP2 ranks gather a unit together: one that leaves it out is stopped before it pairs with another unit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from fourfold.spec.errors import CheckFailed, Problem


class EveryBlock:
    """Watches that each forward of `module` runs all of its `blocks`, in their order.

    Without it a rank that leaves one out would hang the others, or pair its next gathering with theirs of another
    block, which ends the process without a word. Raises CheckFailed in the forward, on the rank that did so.
    Collectives: none.
    """

    def __init__(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        """blocks: by name, in order of execution. To be made after they are wrapped, so that it looks first."""
        self._names = list(blocks)
        self._next: int | None = None
        for index, block in enumerate(blocks.values()):
            block.register_forward_pre_hook(partial(self._come, index), prepend=True)
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end)

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        self._next = 0

    def _come(self, index: int, _block: nn.Module, _args: Any) -> None:
        if self._next is None:
            return  # in backward: it is computed again
        if index > self._next:
            raise CheckFailed(self._left_out(self._next))
        self._next = max(self._next, index + 1)

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        reached, self._next = self._next, None
        if reached is not None and reached < len(self._names):
            raise CheckFailed(self._left_out(reached))

    def _left_out(self, index: int) -> Problem:
        return Problem(
            asked=f'block "{self._names[index]}" in every forward',
            found=f"rank {dist.get_rank()} left it out",
            why="a block is a unit of sharding: all ranks gather it together, at the same place of every forward",
            instead="--set layout.wrap=model  (one unit), or a blocks() of those that every forward runs, in order",
        )
