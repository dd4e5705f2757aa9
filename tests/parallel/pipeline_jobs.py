"""What the tests of stages plant in ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fourfold.data import source
from fourfold.parallel.tied import Tied


def without_rules() -> None:
    """What no version can do is not refused by the ranks."""
    source.require = lambda *_: None


def summed_of_one_end(elsewhere: bool) -> float | None:
    """Rank 1 is the last stage. The tied weight's gradient here, of which only that rank has one, or neither has."""
    rank = dist.get_rank()
    network = nn.ModuleDict({"embedding": nn.Linear(2, 2, bias=False)})
    weight = network.get_parameter("embedding.weight")
    if elsewhere and rank == 1:
        weight.grad = torch.full((2, 2), 3.0)
    Tied(["embedding.weight"], network, None, dist.group.WORLD, rank == 0, may_be_unused=True).sum()
    return None if weight.grad is None else float(weight.grad.mean())
