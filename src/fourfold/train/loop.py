"""The loop, on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from fourfold.data.batch import Batch
from fourfold.launch.rank import Joined
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan
from fourfold.record.run_dir import RunDir
from fourfold.train.bundle import keeping_bundle
from fourfold.train.checks import check_step
from fourfold.train.recorder import Recorder
from fourfold.train.saving import load_state, save_state
from fourfold.train.setup import Beat, Training, open_training
from fourfold.train.step import accumulate, agree_totals, clip, update
from fourfold.train.validation import validate

Ending = Literal["finished", "stopped"]


def train(plan: RunPlan, joined: Joined, run: RunDir, stop: StopRequest, beat: Beat) -> Ending:
    """Train as planned, on this rank; every rank of the world calls it with the same plan.

    Collectives of a step: one tiny sum before its first backward, the gradients' reduction in its last.
    Raises CheckFailed for a failed check, DataError for data or records, what torch raises when a peer is gone.
    """
    with open_training(plan.spec, joined, beat=beat) as training, Recorder(training, plan, run) as record:
        warm_up(training)
        first = load_state(training, Path(plan.resume_from)) if plan.resume_from else 0
        record.started(first)
        for step, batches in steps(training, first):
            with keeping_bundle(training, run, step, batches):
                pending = agree_totals(batches, stop.requested)
                pair, totals = accumulate(training, batches, pending)
                norm = clip(training)
                check_step(training, batches, pair, norm)
                rate = update(training, step)
            saving = save_is_due(training, step, totals.stop)
            record.step(step, batches, pair, norm, rate, totals, saving)
            if saving:
                record.saved(step, save_state(training, run, step, batches))
            if totals.stop:
                return record.ended("stopped", step)
            if validation_is_due(training, step):
                record.validation(step, validate(training, step))
        return record.ended("finished", plan.steps - 1)


def steps(training: Training, first: int) -> Iterator[tuple[int, Sequence[Batch]]]:
    """The steps of the run from `first` (of the run's own, from 0), each with this rank's microbatches."""
    batches = training.loader.steps(first, training.spec.run.steps)
    for step in range(first, training.spec.run.steps):
        training.beat(step + 1, "data")
        yield step, next(batches)


def warm_up(training: Training) -> None:
    """One mock batch, the largest the loader can give: what is too large, or takes no part, shows before step 1.

    It leaves nothing behind: gradients are dropped, buffers (running statistics) put back.
    """
    batch = training.loader.mock()
    before = [(buffer, buffer.clone()) for buffer in training.model.buffers()]
    accumulate(training, [batch], agree_totals([batch], stop_requested=False))
    for buffer, value in before:
        buffer.copy_(value)
    training.optimizer.zero_grad(set_to_none=True)


def save_is_due(training: Training, step: int, stopping: bool) -> bool:
    """After every `checkpoint.every` steps, after the last, and before a stop; never where `every` is 0."""
    every = training.spec.checkpoint.every
    return every > 0 and (stopping or step + 1 == training.spec.run.steps or (step + 1) % every == 0)


def validation_is_due(training: Training, step: int) -> bool:
    """After every `run.validate_every` steps, and after the last."""
    run = training.spec.run
    return step + 1 == run.steps or (run.validate_every > 0 and (step + 1) % run.validate_every == 0)
