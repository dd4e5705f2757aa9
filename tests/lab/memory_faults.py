"""A rank that holds more than was predicted: planted in each rank before the exercise."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fourfold.parallel.sharded import Sharded
from fourfold.train.optimizer import Optimizer


def stage_2_is_stage_1() -> None:
    """Gradients are reduced once a step though they should be after each microbatch."""
    keep = Sharded.__init__

    def made(self: Sharded, *args: Any) -> None:
        keep(self, *args)
        self._stage = 1 if self._stage == 2 else self._stage

    Sharded.__init__ = made  # type: ignore[method-assign]


def rank_1_keeps_a_copy() -> None:
    """One rank keeps its gradients over the end of the step."""
    if dist.get_rank() == 1:
        Optimizer.drop_gradients = lambda _: None  # type: ignore[method-assign, misc]
