"""What each rank does in an equality check: the trainer's own step, every value of it held against the reference.

The step's parts are called by their module, as the trainer's loop calls them: agree, accumulate, clip, update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fourfold.data.source import Sources, open_sources
from fourfold.parallel.balance import correction_names
from fourfold.spec.boxes import Box
from fourfold.spec.spec import Spec
from fourfold.train import loop as train_loop
from fourfold.train import setup as train_setup
from fourfold.train import step as train_step
from fourfold.train.setup import Training
from fourfold.verify.boxes import gradient_gaps, parameter_gaps, parameters
from fourfold.verify.here import joined_here
from fourfold.verify.reference import Reference
from fourfold.verify.uneven import Masking


@dataclass(frozen=True, slots=True)
class StepGaps:
    """One rank's step: its share of the loss, and how far it is from the reference.

    valid: targets of this rank's microbatches; count: of the whole step, as the trainer agreed on it.
    gradients: by parameter, of this rank's box, before clipping; inf where one side has a gradient and the other none.
    """

    loss_sum: float
    valid: int
    count: int
    norm: float
    gradients: dict[str, float]


@dataclass(frozen=True, slots=True)
class RankGaps:
    """One rank's run.

    parameters: by name, of this rank's box, after the last step; boxes: which they are.
    corrections: of routers, after the last step, by the names of their buffers.
    share: which part of the global batch it computes; counts: whether it speaks for that, or a peer does; has_loss:
    whether it knows the loss of it.
    """

    steps: tuple[StepGaps, ...]
    parameters: dict[str, float]
    boxes: dict[str, Box]
    share: int
    counts: bool
    corrections: dict[str, tuple[float, ...]]
    has_loss: bool = True


def measure_rank(spec: Spec, masking: Masking, reference: Reference) -> RankGaps:
    """Train as many steps as the reference has, after the warm-up a run begins with, and compare.

    Collectives: those of the trainer's step. Raises what the trainer raises.
    """
    steps = []
    with opened(spec, masking) as training:
        train_loop.warm_up(training)
        for step, batches in enumerate(training.loader.steps(0, len(reference.steps))):
            pending = train_step.agree_totals(training, batches, False)
            pair, totals = train_step.accumulate(training, batches, pending)
            gradients = gradient_gaps(training, reference, step)
            norm = train_step.clip(training)
            train_step.update(training, step)
            steps.append(StepGaps(float(pair.sum), int(pair.count), totals.count, float(norm), gradients))
        gaps = parameter_gaps(training, reference, len(reference.steps) - 1)
        boxes = {name: part.box for name, part in parameters(training).items()}
        buffers = dict(training.model.named_buffers())
        corrections = {name: tuple(buffers[name].tolist()) for name in correction_names(training.model)}
        parallel = training.parallel
        return RankGaps(
            tuple(steps), gaps, boxes, parallel.share, parallel.counts, corrections, parallel.has_loss
        )


@contextmanager
def opened(spec: Spec, masking: Masking) -> Iterator[Training]:
    """The trainer, opened as a run opens it, on the Spec's data as the check has it."""
    sources = _sources(spec.model_dump_json(include={"data", "model", "run"}), spec)
    sources = replace(sources, train=masking.over(sources.train))
    with train_setup.open_training(spec, joined_here(), sources=sources) as training:
        yield training


class _Last:
    """The data opened last: many layouts are judged on the same."""

    key = ""
    sources: Sources | None = None


def _sources(key: str, spec: Spec) -> Sources:
    if _Last.sources is None or _Last.key != key:
        _Last.key, _Last.sources = key, open_sources(spec)
    return _Last.sources
