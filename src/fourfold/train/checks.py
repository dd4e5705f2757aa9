"""Checks of every step, made before its update: a value that is not finite, or a wrong count, reaches no parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from fourfold.collectives.sums import start_sum
from fourfold.data.batch import Batch
from fourfold.spec.errors import CheckFailed, Problem
from fourfold.train.setup import Training
from fourfold.train.step import LossPair


class NonFinite(CheckFailed):
    """A loss or a gradient is not a finite number."""

    def __init__(self, problems: Problem, secondary: bool = False) -> None:
        super().__init__(problems)
        self.secondary = secondary


def check_step(training: Training, batches: Sequence[Batch], pair: LossPair, norm: Tensor) -> None:
    """Refuse a loss or a global gradient norm that is not finite, and a loss over other targets than the batches'.

    Done here on a CPU, where reading a value waits for nothing; on another device `check_line` does it at the next
    logging step.
    Collectives: only where the norm is not finite, which all ranks see alike: one small sum.
    Raises NonFinite, which names the rank it came from, or CheckFailed.
    """
    if training.device.type == "cpu":
        step = batches[0].step + 1
        _check_finite(training, step, float(pair.sum), float(norm))
        _check_count(step, sum(batch.valid_count() for batch in batches), int(pair.count))


def check_line(line: dict[str, float], targets: int) -> None:
    """The same of one line of metrics, summed over ranks. targets: valid ones the step was divided by."""
    step = int(line["step"])
    if not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])):
        raise NonFinite(_not_finite(step, f"loss {line['loss']}, gradient norm {line['grad_norm']}"))
    _check_count(step, targets, int(line["loss_tokens"]))


def _check_finite(training: Training, step: int, loss: float, size: float) -> None:
    own = not math.isfinite(loss)
    if math.isfinite(size):
        if own:
            raise NonFinite(_not_finite(step, f"a loss sum of {loss} on this rank"))
        return
    # The norm is the same on every rank, so all of them are here.
    rank = training.joined.rank
    origins = start_sum([int(own and one == rank.rank) for one in range(rank.world)]).wait()
    named = ", ".join(str(one) for one, flag in enumerate(origins) if flag)
    if named:
        found = f"the loss is not finite on rank {named}"
    else:
        found = "every rank's loss is finite; the gradient overflowed in backward"
    raise NonFinite(_not_finite(step, f"gradient norm {size}: {found}"), secondary=bool(named) and not own)


def _not_finite(step: int, found: str) -> Problem:
    return Problem(
        asked=f"a finite loss and gradient in step {step}",
        found=found,
        why="one such update makes every parameter it touches useless",
        instead="lower optimizer.lr, or look at the samples: fourfold replay on the failure bundle shows the module",
    )


def _check_count(step: int, targets: int, counted: int) -> None:
    if counted != targets:
        raise CheckFailed(
            Problem(
                asked=f"the loss of step {step} over {targets} valid targets",
                found=f"the model's loss counted {counted}",
                why="the gradient was divided by the batch's count: it is off by the ratio of the two",
                instead="let the model's loss count the same targets as batch.valid (see docs/own_model.md)",
            )
        )
