"""What the tests of invariants run in ranks: a few steps, with something broken before or in the last of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fourfold.parallel.clip import local
from fourfold.spec.errors import CheckFailed
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.train.invariants import Invariants
from fourfold.train.setup import Training, open_training
from fourfold.train.step import accumulate, agree_totals, clip, update
from fourfold.verify.here import joined_here
from tests.parallel.memory_jobs import TINY

NAME = "blocks.1.ffn.up.weight"
STEPS = 3


def watched(sets: tuple[str, ...], fault: str | None) -> None:
    """In the last step `fault` acts on the last rank alone."""
    world = dist.get_world_size()
    plant = FAULTS[fault] if fault is not None and dist.get_rank() == world - 1 else None
    with open_training(settle(load_spec("tiny", (*TINY, *sets)).spec, world), joined_here()) as training:
        invariants = Invariants(training)
        for step, batches in enumerate(training.loader.steps(0, STEPS)):
            accumulate(training, batches, agree_totals(training, batches, False))
            clip(training)
            with invariants.around(step, step != 1):
                update(training, step)
                if step + 1 == STEPS and plant is not None:
                    plant(training)


@torch.no_grad()
def one_value(training: Training) -> None:
    local(training.named_parameters()[NAME]).view(-1)[-1] += 1e-3


@torch.no_grad()
def a_moment(training: Training) -> None:
    training.optimizer.state_of(NAME)["exp_avg_sq"].view(-1)[0] += 1e-3


@torch.no_grad()
def a_count(training: Training) -> None:
    training.optimizer.state_of(NAME)["step"] += 1


def a_rate(training: Training) -> None:
    training.optimizer.adamw.param_groups[0]["lr"] *= 2


@torch.no_grad()
def not_finite(training: Training) -> None:
    local(training.named_parameters()[NAME]).view(-1)[0] = float("nan")


def untied(training: Training) -> None:
    head: Any = training.model.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())


def twice(training: Training) -> None:
    groups = training.optimizer.adamw.param_groups
    groups[1]["params"].append(groups[0]["params"][0])


def no_decay(training: Training) -> None:
    training.optimizer.adamw.param_groups[0]["weight_decay"] = 0.0


def a_narrow_moment(training: Training) -> None:
    state = training.optimizer.adamw.state[training.optimizer.held(NAME)]
    state["exp_avg"] = state["exp_avg"].bfloat16()


def draws(training: Training) -> None:  # noqa: ARG001
    torch.rand(1)


def a_buffer(training: Training) -> None:
    for buffer in training.model.buffers():
        buffer += 1


FAULTS: dict[str, Callable[[Training], None]] = {
    function.__name__: function
    for function in (
        *(one_value, a_moment, a_count, a_rate, not_finite, untied),
        *(twice, no_decay, a_narrow_moment, draws, a_buffer),
    )
}


def moved_or_not(kind: str) -> str:
    """One rank, one step: a parameter without a gradient that moves, or one with a gradient that does not."""
    with open_training(settle(load_spec("tiny", TINY).spec, 1), joined_here()) as training:
        invariants = Invariants(training)
        batches = next(training.loader.steps(5, 6))
        accumulate(training, batches, agree_totals(training, batches, False))
        parameter = training.named_parameters()[NAME]
        before = parameter.detach().clone()
        if kind == "moves without":
            parameter.grad = None
        try:
            with invariants.around(5, saves=True):
                update(training, 5)
                with torch.no_grad():
                    parameter.copy_(before if kind == "stays" else parameter + 1.0)
        except CheckFailed as error:
            return str(error)
    return ""
