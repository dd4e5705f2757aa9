"""What a user may bring along: a model and a transform that draw from the process's own random streams."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fourfold.data.sample import Sample


class Restless(nn.Module):
    """Regression of four features, with running statistics, dropout of torch's own, noise in evaluation too, a part
    that has no gradient in some steps, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.rare = nn.Linear(8, 8, bias=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 1)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(sum of squared errors over valid targets, count of them)."""
        x = self.dropout(torch.relu(self.norm(self.first(batch.inputs.to(self.first.weight.dtype)))))
        x = x + 0.1 * torch.randn_like(x) + 0.1 * self.frozen(x)
        if bool((batch.sample_ids % 3 == 0).any()):
            x = x + self.rare(x)
        error = (self.last(x) - batch.targets).square().mean(-1)
        return error[batch.valid].sum(), batch.valid.sum()


class Moody(nn.Module):
    """Regression whose loss depends on the process it runs in: no run of it repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)
        self.mood = 1.0 + int.from_bytes(os.urandom(2), "big") / 2**16

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(sum of squared errors over valid targets, count of them)."""
        error = (self.last(batch.inputs.to(self.last.weight.dtype)) - batch.targets).square().mean(-1)
        return self.mood * error[batch.valid].sum(), batch.valid.sum()


def jitter(sample: Sample, generator: np.random.Generator) -> Sample:  # noqa: ARG001
    """Noise from numpy's and Python's process-wide streams, though the sample's own generator is at hand."""
    noise = np.random.normal(0.0, 0.1, sample.inputs.shape) + random.gauss(0.0, 0.1)
    return replace(sample, inputs=(sample.inputs + noise).astype(sample.inputs.dtype))
