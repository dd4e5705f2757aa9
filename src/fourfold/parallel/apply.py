"""How a model is spread over ranks: a page of calls, in the order in which they must happen."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fourfold.parallel.data_parallel import check_reduced, replicate
from fourfold.spec.grid import Grid
from fourfold.spec.training import LayoutSpec


@dataclass(frozen=True, slots=True)
class Parallel:
    """A model spread over ranks.

    module: called like the bare one. degree: over how many ranks the global batch is cut. dp_rank: which cut.
    """

    module: nn.Module
    degree: int
    dp_rank: int

    def syncing(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one microbatch: gradients are reduced in the last one only."""
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    def check_reduced(self) -> None:
        """After the last backward: every gradient was reduced, or CheckFailed."""
        if isinstance(self.module, DistributedDataParallel):
            check_reduced(self.module)


def parallelize(module: nn.Module, layout: LayoutSpec, device: torch.device) -> Parallel:
    """Spread `module` as the settled `layout` says; the rules have refused what is not built yet.

    The order is fixed: tensor and sequence parallel, context parallel, expert parallel, recompute, sharded data
    parallel, replicas, pipeline. Of these, replicas exist.
    Collectives: those of `data_parallel.replicate`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = Grid.of(layout).coordinate(rank)
    dp_rank = place["dp_replicate"]
    degree = Grid.of(layout).dp_replicate

    module = module.to(device)
    if degree > 1:
        module = replicate(module, layout, device)
    return Parallel(module, degree, dp_rank)
