"""Initial values that do not depend on where or in what order a network is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fourfold.models.draws import normal
from fourfold.models.protocol import Start


class Linear(nn.Linear):
    """torch's Linear without its own initial values: they cost time and advance the global generator."""

    def reset_parameters(self) -> None:
        """Nothing: `fill` gives the values."""


class Embedding(nn.Embedding):
    """torch's Embedding without its own initial values."""

    def reset_parameters(self) -> None:
        """Nothing: `fill` gives the values."""


def initial_values(
    seed: int,
    name: str,
    start: Start,
    shape: Sequence[int],
    offset: Sequence[int] | None = None,
    full_shape: Sequence[int] | None = None,
) -> Tensor:
    """Initial values in fp64 of parameter `name`, or of the box of `shape` at `offset` of its `full_shape`."""
    values = torch.full((*shape,), start.mean, dtype=torch.float64, device="cpu")
    if start.std:
        values += normal(seed, name, shape, start.std, torch.float64, offset, full_shape)
    return values


@torch.no_grad()
def fill(module: nn.Module, start: Callable[[str], Start], seed: int, dtype: torch.dtype) -> None:
    """Puts every parameter in `dtype` and gives it the values that `seed`, its name and `start(its name)` say.

    fp64 holds the exact values of which fp32 is the rounding.
    """
    module.to(dtype)
    for name, parameter in module.named_parameters():
        parameter.copy_(initial_values(seed, name, start(name), parameter.shape))
