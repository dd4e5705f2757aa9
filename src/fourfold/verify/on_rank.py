"""What each rank does in an equality check: the trainer's own step, every value of it held against the reference.

The step's parts are called by their module, as the trainer's loop calls them: agree, accumulate, clip, update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from fourfold.data.source import open_sources
from fourfold.record.writer import JsonLines
from fourfold.spec.spec import Spec
from fourfold.train import loop as train_loop
from fourfold.train import setup as train_setup
from fourfold.train import step as train_step
from fourfold.train.setup import Training
from fourfold.verify.here import joined_here
from fourfold.verify.measure import (
    GRADIENT_TOLERANCE,
    NORM_TOLERANCE,
    relative_gap,
    within,
)
from fourfold.verify.reference import Reference
from fourfold.verify.trace import CLIPPED, NORM, OWN, REDUCED, UPDATED, Tracer, tracing
from fourfold.verify.uneven import UnevenSource

Arrays = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class StepGaps:
    """One rank's step: its share of the loss, and how far it is from the reference.

    valid: targets of this rank's microbatches; count: of the whole step, as the trainer agreed on it.
    gradients: by parameter, before clipping; inf where one side has a gradient and the other has none.
    """

    loss_sum: float
    valid: int
    count: int
    norm: float
    gradients: dict[str, float]


@dataclass(frozen=True, slots=True)
class RankGaps:
    """One rank's run; parameters: by name, after the last step."""

    steps: tuple[StepGaps, ...]
    parameters: dict[str, float]


def measure_rank(spec: Spec, salt: int, reference: Reference) -> RankGaps:
    """Train as many steps as the reference has, after the warm-up a run begins with, and compare.

    Collectives: those of the trainer's step. Raises what the trainer raises.
    """
    steps = []
    with _training(spec, salt) as training:
        train_loop.warm_up(training)
        for step, batches in enumerate(training.loader.steps(0, len(reference.steps))):
            pending = train_step.agree_totals(batches, False)
            pair, totals = train_step.accumulate(training, batches, pending)
            gradients = gradient_gaps(_gradients(training), reference, step)
            norm = train_step.clip(training)
            train_step.update(training, step)
            steps.append(StepGaps(float(pair.sum), int(pair.count), totals.count, float(norm), gradients))
        parameters = parameter_gaps(training, reference, len(reference.steps) - 1)
    return RankGaps(tuple(steps), parameters)


def trace_rank(
    spec: Spec, salt: int, reference: Reference, steps: int, folder: Path, parameter_tolerance: float
) -> None:
    """The same again for `steps` steps, with everything each microbatch computes written to `folder`/rank<r>.jsonl.

    After the events of a step's microbatches come its "stage" lines, each with the tensors that deviate there; or
    one "failed" line. What a rank wrote before it was killed stays.
    Collectives: those of the trainer's step, and all-reduces of gradients for the diagnosis.
    """
    with (
        _training(spec, salt) as training,
        JsonLines(folder / f"rank{dist.get_rank()}.jsonl") as lines,
        tracing(training.loss_module, training.model, lines) as tracer,
    ):
        for step, batches in enumerate(training.loader.steps(0, steps)):
            try:
                pending = train_step.agree_totals(batches, False)
                train_step.accumulate(training, batches, pending)
            except Exception as error:
                tracer.flush()
                lines.write({"step": step, "failed": f"{type(error).__name__}: {error}"})
                raise
            tracer.flush()
            for line in _stages(training, reference, step, tracer, parameter_tolerance):
                lines.write({"step": step, **line})
            tracer.forget()


def _stages(
    training: Training, reference: Reference, step: int, tracer: Tracer, parameter_tolerance: float
) -> Iterator[dict[str, Any]]:
    """What the optimizer's half of a step does, stage by stage."""
    expected = reference.steps[step]
    own = _deviating(_own_gaps(training, reference, step, tracer), GRADIENT_TOLERANCE)
    yield {"stage": OWN, "gaps": own}
    gaps = gradient_gaps(_gradients(training), reference, step)
    deviating = _deviating(gaps, GRADIENT_TOLERANCE)
    # All ranks reduce the same tensors, whichever rank sees them deviate.
    notes = _explain(training, reference, step, _union(deviating), tracer)
    yield {"stage": REDUCED, "gaps": deviating, "notes": {n: notes[n] for n in deviating if n in notes}}
    norm = float(train_step.clip(training))
    gap = relative_gap(norm, expected.norm, 0.0)
    yield {"stage": NORM, "gaps": {} if within(gap, NORM_TOLERANCE) else {"global norm": gap}}
    clip_norm = training.spec.optimizer.clip_norm
    factor = min(1.0, clip_norm / expected.norm) if clip_norm > 0 and expected.norm > 0 else 1.0
    scaled = gradient_gaps(_gradients(training), reference, step, factor)
    yield {"stage": CLIPPED, "gaps": _deviating(scaled, GRADIENT_TOLERANCE)}
    rate = train_step.update(training, step)
    yield {
        "stage": UPDATED,
        "gaps": _deviating(parameter_gaps(training, reference, step), parameter_tolerance),
        "rate": [rate, expected.rate],
    }


def _own_gaps(training: Training, reference: Reference, step: int, tracer: Tracer) -> dict[str, float]:
    """Gap of each gradient as the microbatches of all ranks gave it, summed here, before the trainer reduced it.

    Collectives: an all-reduce of one number, and one of each gradient.
    """
    weight = torch.tensor(tracer.weight or 0.0, dtype=torch.float64)
    dist.all_reduce(weight, op=dist.ReduceOp.MAX)
    # The trainer's factor before every loss, such as degree / count, against 1 / count.
    scale = 1.0 / max(reference.steps[step].count, 1) / (float(weight) or 1.0)
    summed = {}
    for name, parameter in training.named_parameters().items():
        total = tracer.own.get(name, torch.zeros_like(parameter)).detach().clone()
        dist.all_reduce(total)
        if name not in reference.steps[step].without_gradient or bool((total != 0).any()):
            summed[name] = (total * scale).numpy()
    return gradient_gaps(summed, reference, step)


def gradient_gaps(
    gradients: Arrays, reference: Reference, step: int, factor: float = 1.0
) -> dict[str, float]:
    """Gap of each gradient to `factor` times the reference's; inf where only one of them exists."""
    expected = reference.gradients(step)
    largest = reference.steps[step].largest_gradient * factor
    return {
        name: relative_gap(gradients[name], expected[name] * factor, largest)
        if name in gradients and name in expected
        else math.inf
        for name in reference.names
        if name in gradients or name in expected
    }


def parameter_gaps(training: Training, reference: Reference, step: int) -> dict[str, float]:
    """Gap of each parameter to the reference's after `step`."""
    expected = reference.parameters(step)
    held = {name: p.detach().cpu().numpy() for name, p in training.named_parameters().items()}
    return {
        name: relative_gap(held[name], expected[name], reference.largest_parameter)
        if name in held and name in expected
        else math.inf
        for name in held.keys() | expected.keys()
    }


def _explain(
    training: Training,
    reference: Reference,
    step: int,
    names: Sequence[str],
    tracer: Tracer,
) -> dict[str, str]:
    """What a wrong gradient is equal to, if it is something simple.

    Collectives: two all-reduces on the world for each name.
    """
    held, expected = _gradients(training), reference.gradients(step)
    parameters = training.named_parameters()
    found = {}
    for name in names:
        mine = tracer.own.get(name, torch.zeros_like(parameters[name]))
        tail = tracer.last.get(name, torch.zeros_like(parameters[name]))
        all_last = tail.clone()
        dist.all_reduce(all_last)
        if name not in held:
            found[name] = "this rank has no gradient where one device has one"
        elif name not in expected:
            found[name] = "this rank has a gradient where one device has none"
        else:
            guesses = (
                ("{} × the right one", expected[name]),
                ("{} × this rank's own microbatches alone: it was not reduced", mine.numpy()),
                ("{} × the last microbatch of every rank: the earlier ones were lost", all_last.numpy()),
                ("{} × this rank's last microbatch alone", tail.numpy()),
            )
            for text, guess in guesses:
                factor = _factor(held[name], guess)
                if factor is not None:
                    found[name] = "it is " + text.format(f"{factor:.6g}")
                    break
    return found


def _factor(actual: NDArray[np.float64], guess: NDArray[np.float64]) -> float | None:
    """The number c with actual = c × guess, if there is one."""
    square = float(np.vdot(guess, guess))
    if not np.isfinite(square) or square == 0.0:
        return None
    factor = float(np.vdot(actual, guess)) / square
    return factor if within(relative_gap(actual, factor * guess, 0.0), 1e-9) else None


def _union(gaps: Mapping[str, float]) -> list[str]:
    """Names of all ranks' gaps, in one order. Collectives: one all-gather of objects."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(gaps))
    return sorted({name for names in gathered for name in names})


def _deviating(gaps: Mapping[str, float], tolerance: float) -> dict[str, float]:
    return {name: gap for name, gap in gaps.items() if not within(gap, tolerance)}


def _gradients(training: Training) -> dict[str, NDArray[np.float64]]:
    """This rank's gradients as arrays that share their memory."""
    return {
        name: p.grad.detach().cpu().numpy()
        for name, p in training.named_parameters().items()
        if p.grad is not None
    }


@contextmanager
def _training(spec: Spec, salt: int) -> Iterator[Training]:
    """The trainer, opened as a run opens it, on the Spec's data with masked tails."""
    sources = open_sources(spec)
    sources = replace(sources, train=UnevenSource(sources.train, salt))
    with train_setup.open_training(spec, joined_here(), sources=sources) as training:
        yield training
