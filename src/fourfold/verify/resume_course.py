"""How a resume check cuts a Spec short: an epoch of a few steps, more than two epochs, and where each life ends."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fourfold.data.sample import Sample, Source
from fourfold.data.schedule import steps_per_epoch
from fourfold.data.source import Sources
from fourfold.spec.spec import Spec
from fourfold.spec.training import OptimizerSpec

EVERY = 2  # steps between checkpoints: a kill may fall between two
EPOCH_STEPS = 6  # long enough to be killed twice inside one
VALIDATE_EVERY = 3  # so that some validations follow a checkpoint of the same step, and some do not
WORKERS = 2


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The first `samples` of a source, as a source."""

    source: Source
    samples: int

    @property
    def vocabulary(self) -> int | None:
        return self.source.vocabulary

    def __len__(self) -> int:
        return self.samples

    def sample(self, index: int) -> Sample:
        return self.source.sample(index)

    def largest(self) -> Sample:
        return self.source.largest()

    def counts(self) -> dict[str, int]:
        return {**self.source.counts(), "samples": self.samples}


def first_samples(sources: Sources, samples: int) -> Sources:
    """The same data with a training source of `samples` samples."""
    return replace(sources, train=FirstSamples(sources.train, samples))


@dataclass(frozen=True, slots=True)
class Interruption:
    """The last rank sends itself `signal` when it says that it is in `phase` of `step` (from 1)."""

    signal: signal.Signals
    step: int
    phase: str

    def __str__(self) -> str:
        return f"{self.signal.name} in step {self.step} ({self.phase})"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run that is interrupted so often, and continued each time by fresh processes.

    name: of its run directory. workers: loader processes per rank. leftover: before the first continuation a save that
    was never published is laid beside the checkpoints, whole, and of a later step than any.
    """

    name: str
    title: str
    interruptions: tuple[Interruption, ...] = ()
    workers: int = 0
    leftover: bool = False


@dataclass(frozen=True, slots=True)
class Course:
    """What is run. samples: of the cut training source; epoch_steps: steps of an epoch of it; steps: of the run.

    edge: the first checkpoint that lies exactly at the end of an epoch. twice: whether there is an epoch in which a run
    can be killed twice.
    """

    samples: int
    epoch_steps: int
    steps: int
    edge: int
    twice: bool
    undisturbed: Scenario
    scenarios: tuple[Scenario, ...]


def plan_course(spec: Spec, available: int, validates: bool) -> Course:
    """The course for a settled Spec with `available` training samples, at least one global batch of them.

    validates: there is a validation set.
    """
    whole = spec.batch.global_batch
    assert whole, "the Spec is not settled"
    # Half a global batch remains at the end of an epoch: dropped or kept, it shows.
    kept = spec.data.last_batch == "keep"
    wanted = (EPOCH_STEPS - 1) * whole + max(1, whole // 2) if kept else EPOCH_STEPS * whole + whole // 2
    samples = min(wanted, available)
    epoch = steps_per_epoch(samples, whole, spec.data.last_batch)
    edge = math.lcm(epoch, EVERY)
    stop = epoch + 2 + (epoch + 1) % 2  # odd, so that no checkpoint is due, and in the second epoch or later
    both = math.lcm(EVERY, VALIDATE_EVERY)
    validation = both * (stop // both + 1)  # right after a checkpoint
    twice = next(_twice(epoch), None)
    kills = twice or (4, 5)
    return Course(
        samples=samples,
        epoch_steps=epoch,
        steps=max(2 * epoch, edge + EVERY, validation, *kills) + 1,
        edge=edge,
        twice=twice is not None,
        undisturbed=Scenario("undisturbed", "undisturbed", workers=spec.data.workers),
        scenarios=(
            Scenario(
                "killed-twice",
                "killed twice in one epoch" if twice else "killed twice",
                (_killed(kills[0], "backward"), _killed(kills[1], "update")),
                spec.data.workers,
            ),
            Scenario(
                "killed-at-an-edge",
                "killed at an epoch's edge",
                (_killed(edge + EVERY, "save"),),
                spec.data.workers or WORKERS,
                leftover=True,
            ),
            Scenario(
                "stopped",
                "stopped by a signal",
                (
                    Interruption(signal.SIGTERM, stop, "data"),
                    *([_killed(validation, "validation")] if validates else []),
                ),
                spec.data.workers,
            ),
        ),
    )


def _killed(step: int, phase: str) -> Interruption:
    return Interruption(signal.SIGKILL, step, phase)


def _twice(epoch: int) -> Iterator[tuple[int, int]]:
    """Steps at which a run can be killed, first and again, in the middle of one and the same epoch; the best first."""

    def saved(step: int) -> int:
        return (step - 1) // EVERY * EVERY

    found = [
        (first, again)
        for first in range(2, 2 * epoch + 1)
        for again in range(first + 1, 2 * epoch + 1)
        if len({(step - 1) // epoch for step in (saved(first) + 1, first, saved(again) + 1, again)}) == 1
        and saved(first) % epoch
    ]
    # Better: from two checkpoints, and with a finished step that is lost and done again.
    yield from sorted(
        found, key=lambda two: (saved(two[0]) == saved(two[1]), saved(two[0]) == two[0] - 1, two)
    )


def cut_schedule(optimizer: OptimizerSpec, steps: int) -> dict[str, object]:
    """New lengths of warm-up and decay where these two do not fit into `steps`; nothing where they do."""
    if optimizer.decay_steps is None or optimizer.decay_steps + optimizer.warmup_steps <= steps:
        return {}
    third = steps // 3
    return {"warmup_steps": min(optimizer.warmup_steps, third), "decay_steps": third}


def shortened(spec: Spec, course: Course, available: int, validates: bool) -> tuple[Spec, tuple[str, ...]]:
    """The settled Spec as the check runs it, and what was changed, in words.

    Model, batch, layout, precision, dropout and optimizer stay; of the optimizer only a decay that is longer than the
    check is cut.
    """
    changed: dict[str, dict[str, object]] = {
        "run": {
            "steps": course.steps,
            "log_every": 1,
            "validate_every": VALIDATE_EVERY if validates else 0,
            "validation_batches": 1,
        },
        "checkpoint": {"every": EVERY, "every_s": 0.0, "keep_last": course.steps},
        "hardware": {"device": "cpu", "threads_per_rank": 1},
        "optimizer": cut_schedule(spec.optimizer, course.steps),
    }
    words = [
        f"{section}.{key} {'by default' if before is None else before} -> {value}"
        for section, entries in changed.items()
        for key, value in entries.items()
        if (before := getattr(getattr(spec, section), key)) != value
    ]
    words += [
        f"data.workers {spec.data.workers} -> {scenario.workers}, where it is {scenario.title}"
        for scenario in course.scenarios
        if scenario.workers != spec.data.workers
    ]
    if course.samples < available:
        words.append(f"the first {course.samples:,} of {available:,} training samples")
    words.append("run.dir: a folder of its own for every run")
    sections = {
        section: getattr(spec, section).model_copy(update=entries) for section, entries in changed.items()
    }
    return spec.model_copy(update=sections), tuple(words)
