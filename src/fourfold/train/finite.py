"""Non-finite values stop a run before they reach a parameter."""

from __future__ import annotations

import math

from torch import Tensor

from fourfold.collectives.sums import start_sum
from fourfold.spec.errors import CheckFailed, Problem
from fourfold.train.setup import Training
from fourfold.train.step import LossPair


class NonFinite(CheckFailed):
    """A loss or a gradient is not a finite number."""

    def __init__(self, problems: Problem, secondary: bool = False) -> None:
        super().__init__(problems)
        self.secondary = secondary


def refuse_nonfinite(training: Training, step: int, pair: LossPair, norm: Tensor) -> None:
    """Raise NonFinite if this rank's loss or the global gradient norm is not finite; the origin is named.

    They are read here on a CPU, where reading waits for nothing; on another device `refuse_nonfinite_line` finds
    them at the next logging step.
    Collectives: only where the norm is not finite, which all ranks see alike: one small sum.
    """
    if training.device.type != "cpu":
        return
    loss, size = float(pair.sum), float(norm)
    own = not math.isfinite(loss)
    if math.isfinite(size):
        if own:
            raise NonFinite(_problem(step, f"a loss sum of {loss} on this rank"))
        return
    rank = training.joined.rank
    origins = start_sum([int(own and one == rank.rank) for one in range(rank.world)]).wait()
    named = ", ".join(str(one) for one, flag in enumerate(origins) if flag)
    if named:
        found = f"the loss is not finite on rank {named}"
    else:
        found = "every rank's loss is finite; the gradient overflowed in backward"
    raise NonFinite(_problem(step, f"gradient norm {size}: {found}"), secondary=bool(named) and not own)


def refuse_nonfinite_line(line: dict[str, float]) -> None:
    """Raise NonFinite if a line of metrics is not finite."""
    if not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])):
        found = f"loss {line['loss']}, gradient norm {line['grad_norm']}"
        raise NonFinite(_problem(int(line["step"]) - 1, found))


def _problem(step: int, found: str) -> Problem:
    return Problem(
        asked=f"a finite loss and gradient in step {step + 1}",
        found=found,
        why="one such update makes every parameter it touches useless",
        instead="lower optimizer.lr, or look at the samples: fourfold replay on the failure bundle shows the module",
    )
