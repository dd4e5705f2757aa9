"""The loop, on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from fourfold.collectives.fingerprints import Fingerprints
from fourfold.data.batch import Batch
from fourfold.data.source import Sources
from fourfold.launch.rank import Joined
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan
from fourfold.record.run_dir import RunDir
from fourfold.train.bundle import keeping_bundle
from fourfold.train.checks import check_clipped, check_masters, check_step, check_unscaled
from fourfold.train.invariants import Invariants
from fourfold.train.observe import untouched
from fourfold.train.recorder import Recorder
from fourfold.train.saver import Saver
from fourfold.train.setup import Beat, Training, open_training
from fourfold.train.step import accumulate, agree_totals, clip, update
from fourfold.train.validation import validate

Ending = Literal["finished", "stopped"]


def train(
    plan: RunPlan,
    joined: Joined,
    run: RunDir,
    stop: StopRequest,
    beat: Beat,
    sources: Sources | None = None,
    calls: Fingerprints | None = None,
) -> Ending:
    """Train as planned, on this rank; every rank of the world calls it with the same plan.

    sources: opened data in place of the Spec's own. calls: the record of this rank's collectives, where one is kept.
    Collectives of a step: one tiny sum before its first backward, the gradients' reduction in its last; every
    `run.check_every` steps those of `Invariants`.
    Raises CheckFailed for a failed check, DataError for data, records or a save without which the run cannot end or
    go on, what torch raises when a peer is gone.
    """
    with (
        open_training(plan.spec, joined, sources=sources, beat=beat, scratch=run.offload) as training,
        Recorder(training, plan, run, stop) as record,
    ):
        warm_up(training)
        saver = Saver(training, run, record)
        first = saver.restore(plan.resume_from)
        invariants = Invariants(training, calls)
        record.started(first)
        if first and not evaluate(training, first - 1, record, stop):
            return record.ended("stopped", first - 1)
        for step, batches in steps(training, first):
            with keeping_bundle(training, run, step, batches):
                pending = agree_totals(training, batches, stop.requested, saver.time_is_up())
                pair, totals = accumulate(training, batches, pending)
                norm = clip(training)
                check_step(training, batches, pair, norm)
                with invariants.around(step, saver.is_due(step, totals)):
                    rate = update(training, step)
            record.step(step, batches, pair, norm, rate, totals)
            if saver.is_due(step, totals):
                saver.save(step, batches, stopping=totals.stop)
            if totals.stop and step + 1 < plan.steps:
                return record.ended("stopped", step)
            if not evaluate(training, step, record, stop):
                saver.save(step, batches, stopping=True)
                return record.ended("stopped", step)
        return record.ended("finished", plan.steps - 1)


def steps(training: Training, first: int) -> Iterator[tuple[int, Sequence[Batch]]]:
    """The steps of the run from `first` (of the run's own, from 0), each with this rank's microbatches."""
    batches = training.loader.steps(first, training.spec.run.steps)
    for step in range(first, training.spec.run.steps):
        training.beat(step + 1, "data")
        yield step, next(batches)


def warm_up(training: Training) -> None:
    """One mock batch, the largest the loader can give: what is too large, or takes no part, shows before step 1.

    So does a wrong dtype, a wrong order of unscaling and clipping, or clipping without effect: under loss scaling the
    batch is tried with two scales. It leaves nothing behind: gradients are dropped, buffers (running statistics) and
    random streams put back.
    """

    def beat(step: int, phase: str, patient: bool = False) -> None:  # noqa: ARG001
        training.beat(0, f"warm-up: {phase}", patient)

    # A pipeline runs as many of them as there are in a step: its schedule is made for that.
    microbatches = training.schedule.accumulation if training.parallel.pipeline is not None else 1
    batches = [training.loader.mock()] * microbatches
    check_masters(training)
    norms = []
    with untouched(training):
        for scale in training.scale.trials():
            trial = replace(training, beat=beat, scale=scale)
            accumulate(trial, batches, agree_totals(trial, batches, stop_requested=False))
            norms.append(clip(trial))
            check_clipped(trial, norms[-1])
            training.optimizer.drop_gradients()
    check_unscaled(training, norms)


def evaluate(training: Training, step: int, record: Recorder, stop: StopRequest) -> bool:
    """The validation after `step`, if one is due; False if a signal broke it off, and then nothing is recorded."""
    run = training.spec.run
    if step + 1 == run.steps or (run.validate_every > 0 and (step + 1) % run.validate_every == 0):
        result = validate(training, step, stop)
        if result == "broken off":
            return False
        record.validation(step, result)
    return True
