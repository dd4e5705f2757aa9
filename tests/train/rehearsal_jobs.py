"""What the tests of rehearsals run: real steps, watched as a rehearsal is, and rehearsals in a process of their own."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist

from fourfold.collectives.count import Collectives
from fourfold.plan.rehearsal import Traffic
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.train.live import LiveBytes
from fourfold.train.rehearsed_step import traffic_of
from fourfold.train.setup import open_training
from fourfold.train.step import accumulate, agree_totals, clip, update
from fourfold.verify.here import joined_here
from tests.parallel.memory_jobs import TINY

STEPS = 3  # the last one is watched


def asked(sets: tuple[str, ...], world: int, source: str = "tiny") -> Spec:
    sets = (*TINY, *sets) if source == "tiny" else sets
    return settle(load_spec(source, sets).spec, world)


def real(sets: tuple[str, ...], source: str = "tiny") -> tuple[tuple[Traffic, ...], int]:
    """Of a real step on this rank: its collectives, and the most bytes alive in it."""
    live, collectives = LiveBytes(), Collectives()
    with live, open_training(asked(sets, dist.get_world_size(), source), joined_here()) as training:
        mocks = [training.loader.mock()] * training.schedule.accumulation
        for step in range(STEPS - 1):
            accumulate(training, mocks, agree_totals(training, mocks, False))
            clip(training)
            update(training, step)
        gc.collect()  # and not in mid-step: cycles of objects hold tensors until then, in a rehearsal too
        gc.disable()
        live.begin()
        with collectives:
            accumulate(training, mocks, agree_totals(training, mocks, False))
            clip(training)
            update(training, STEPS - 1)
        gc.enable()
    return traffic_of(collectives.found, training.parallel.grid, dist.get_rank()), live.most


def printing() -> torch.nn.Module:
    """A factory that prints when it is called."""
    print("hello from the model")
    return _Sum()


class _Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(256, 8))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss(batch, self.weight[batch.inputs].sum(-1)), batch.valid.sum()

    def loss(self, batch: Any, of_each: torch.Tensor) -> torch.Tensor:
        return (of_each[batch.valid].square() + of_each.masked_select(batch.valid)).sum()


class _Reads(_Sum):
    def loss(self, _batch: Any, of_each: torch.Tensor) -> torch.Tensor:
        return of_each.sum() * max(of_each.max().item(), 1.0)


class _Wrong(_Sum):
    def loss(self, _batch: Any, of_each: torch.Tensor) -> torch.Tensor:
        return (of_each @ torch.ones(3, 3)).sum()


def reads() -> torch.nn.Module:
    """A model that reads a number of its own in forward."""
    return _Reads()


def wrong() -> torch.nn.Module:
    """A model whose shapes do not fit."""
    return _Wrong()
