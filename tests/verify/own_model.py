"""A user's model of which one part is never used, and one only for some samples; one layer is called twice."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Sometimes(nn.Module):
    """Regression of four features."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.rare = nn.Linear(4, 4, bias=False)
        self.never = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 1)

    def forward(self, batch: object) -> tuple[Tensor, Tensor]:
        """(sum of squared errors over valid targets, count of them)."""
        x = torch.tanh(self.first(batch.inputs.to(self.first.weight.dtype)))
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        if bool((batch.sample_ids % 3 == 0).any()):
            x = x + self.rare(x) * (batch.sample_ids % 3 == 0).unsqueeze(1)
        error = (self.last(x) - batch.targets).square().mean(-1)
        return error[batch.valid].sum(), batch.valid.sum()


def sometimes() -> nn.Module:
    return Sometimes()


class LateNan(nn.Module):
    """Its loss is not finite from the third step on, on one device as on many."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 1)

    def forward(self, batch: object) -> tuple[Tensor, Tensor]:
        error = (self.only(batch.inputs.to(self.only.weight.dtype)) - batch.targets).square().mean(-1)
        total = error[batch.valid].sum()
        return total * (float("nan") if batch.step >= 2 else 1.0), batch.valid.sum()


def late_nan() -> nn.Module:
    return LateNan()
