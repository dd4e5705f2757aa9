"""Models of a user's in which a kind of fault lies, each beside one that is right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Regression(nn.Module):
    """Four features to one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(sum of squared errors over valid targets, count of them)."""
        hidden = torch.tanh(self.first(batch.inputs.to(self.first.weight.dtype)))
        error = (self.last(hidden) - batch.targets).square().mean(-1)
        return error[batch.valid].sum() + self.more(hidden, batch.valid), batch.valid.sum()

    def more(self, hidden: Tensor, valid: Tensor) -> Tensor | float:  # noqa: ARG002
        """What is added to the sum."""
        return 0.0


class AuxiliaryOfTheMicrobatch(Regression):
    """A mean over the microbatch is added to a sum over targets: another cut gives another loss."""

    def more(self, hidden: Tensor, valid: Tensor) -> Tensor | float:  # noqa: ARG002
        """One mean for each microbatch."""
        return hidden.square().mean()


class AuxiliaryOfTheSample(Regression):
    """The same auxiliary loss as a sum over samples, like the other."""

    def more(self, hidden: Tensor, valid: Tensor) -> Tensor | float:
        """One mean for each sample."""
        return hidden.square().mean(-1)[valid].sum()


class EveryOtherStep(Regression):
    """A layer takes part in the first step, the third, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, 8)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(sum of squared errors over valid targets, count of them)."""
        hidden = torch.tanh(self.first(batch.inputs.to(self.first.weight.dtype)))
        if batch.step % 2 == 0:
            hidden = hidden + self.second(hidden)
        error = (self.last(hidden) - batch.targets).square().mean(-1)
        return error[batch.valid].sum(), batch.valid.sum()
