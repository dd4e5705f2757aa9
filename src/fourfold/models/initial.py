"""Initial values that do not depend on where or in what order a network is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fourfold.models.draws import normal


class Start(NamedTuple):
    """Where a parameter's values start: normal around `mean`, or just `mean` where `std` is 0."""

    mean: float
    std: float


class Linear(nn.Linear):
    """torch's Linear without its own initial values: they cost time and advance the global generator."""

    def reset_parameters(self) -> None:
        """Nothing: `fill` gives the values."""


class Embedding(nn.Embedding):
    """torch's Embedding without its own initial values."""

    def reset_parameters(self) -> None:
        """Nothing: `fill` gives the values."""


@torch.no_grad()
def fill(module: nn.Module, start: Callable[[str], Start], seed: int, dtype: torch.dtype) -> None:
    """Puts every parameter in `dtype` and gives it the values that `seed`, its name and `start(its name)` say.

    fp64 holds the exact values of which fp32 is the rounding.
    """
    module.to(dtype)
    for name, parameter in module.named_parameters():
        mean, std = start(name)
        values = torch.full(parameter.shape, mean, dtype=torch.float64)
        if std:
            values += normal(seed, name, parameter.shape, std, torch.float64)
        parameter.copy_(values)
