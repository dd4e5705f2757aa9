"""What the tests of stages plant in ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fourfold.data import source
from fourfold.parallel.tied import Tied
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.train.setup import open_training
from fourfold.train.step import accumulate, agree_totals, clip, update
from fourfold.verify.here import joined_here

PERCEPTRON = (
    'model={kind="mlp", inputs=8, hidden=16, layers=4}',
    'data={kind="synthetic", samples=64}',
    "batch.global_batch=8",
)


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


def losses_of_a_perceptron(*sets: str) -> list[float]:
    """The loss sums of two steps, on the ranks that have them."""
    told = []
    with open_training(
        settle(load_spec("tiny", (*PERCEPTRON, *sets)).spec, dist.get_world_size()), joined_here()
    ) as training:
        for step, batches in enumerate(training.loader.steps(0, 2)):
            pair, _ = accumulate(training, batches, agree_totals(training, batches, False))
            told.append(float(pair.sum))
            clip(training)
            update(training, step)
    return told
