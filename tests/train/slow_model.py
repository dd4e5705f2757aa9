"""A small model whose every phase takes long enough to be met from outside."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from tests.train.rank_jobs import SMALLEST

SETS = (
    'model={kind="import", target="tests.train.slow_model:Slow"}',
    *(setting for setting in SMALLEST if setting.startswith(("batch", "optimizer", "run", "precision"))),
    'data.kind="synthetic"',
    "data.samples=40",
    "data.inputs=4",
    "data.outputs=1",
    'data.task="regression"',
    "data.validation_fraction=0.5",
    'data.transforms=[{kind="import", target="tests.train.slow_data:slowly"}]',
)


class Slow(nn.Module):
    """A perceptron with dropout, from torch's own random stream: one that a checkpoint has to keep."""

    def __init__(self, inputs: int = 4, seconds: float = 0.02) -> None:
        super().__init__()
        time.sleep(0.3)
        self.seconds = seconds
        self.layers = nn.Sequential(nn.Linear(inputs, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        error = (self.layers(batch.inputs) - batch.targets).square().mean(-1)
        return torch.where(batch.valid, error, 0.0).sum(), batch.valid.sum()
