"""What the tests of saving run in ranks: whole runs, with a signal or a full disk in the middle, and going on again."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from fourfold.checkpoint.validate import read_manifest
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import make_run_plan
from fourfold.record import writer
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import DataError, FourfoldError, Problem
from fourfold.spec.load import load_spec
from fourfold.train import loop, saver, saving
from fourfold.train.recorder import Recorder
from fourfold.train.setup import Training, open_training
from fourfold.train.state import tensors_of
from fourfold.verify.here import joined_here
from tests.checkpoint.rank_jobs import no_room
from tests.train.rank_jobs import SMALLEST, events, spec

LONG_VALIDATION = (
    "data.samples=400",
    "data.validation_fraction=0.5",
    "run.validate_every=2",
    "model.dropout=0.2",
)
GROWN = False  # whether `Growing` has its second head


class Normed(torch.nn.Module):
    """A line behind a batch norm, whose running statistics are each rank's own until the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4, dtype=torch.float64)
        self.line = torch.nn.Linear(4, 1, dtype=torch.float64)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("odd", torch.zeros((), dtype=torch.bool))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            self.steps += 1
            self.odd = ~self.odd
        drawn = torch.rand(()).double()  # of the process's own stream, in evaluation too
        guess = self.line(self.norm(batch.inputs)) * (1 + 0.01 * drawn) + 1e-3 * self.steps
        return _error(guess, batch)


class Counting(torch.nn.Linear):
    """A layer that counts in a number of its own, which is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: object) -> None:
        pass


class Extra(torch.nn.Module):
    """A line that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Counting(4, 1, dtype=torch.float64)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _error(self.line(batch.inputs), batch)


class Broken(torch.nn.Module):
    """A line whose gradient cannot be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        guess = self.line(batch.inputs)
        guess.register_hook(_refused)
        return _error(guess, batch)


def _refused(_: torch.Tensor) -> None:
    raise ValueError("no gradient of this")


class Growing(torch.nn.Module):
    """A line that is given a second head between two starts (GROWN), and then has its first no more."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 4, dtype=torch.float64)
        self.add_module("second" if GROWN else "first", torch.nn.Linear(4, 1, dtype=torch.float64))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        head = self.get_submodule("second" if GROWN else "first")
        return _error(head(self.body(batch.inputs)), batch)


def _error(guess: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    error = (guess - batch.targets).square().mean(-1)
    return torch.where(batch.valid, error, 0.0).sum(), batch.valid.sum()


def own_model(name: str, *sets: str) -> tuple[str, ...]:
    """What makes `tiny` a Spec of one of these."""
    return (
        f'model={{kind="import", target="tests.train.saver_jobs:{name}"}}',
        *(setting for setting in SMALLEST if setting.startswith(("batch", "optimizer", "run", "precision"))),
        *('data.kind="synthetic"', "data.samples=40", "data.inputs=4", "data.outputs=1"),
        'data.task="regression"',
        *sets,
    )


class Signal:
    """A beat that sends this process SIGTERM when it comes to a phase of a step (from 1) for the nth time, on one rank;
    and remembers every beat."""

    def __init__(self, step: int, phase: str, who: int = 1, nth: int = 1) -> None:
        self._when = (step, phase)
        self._left = nth if dist.get_rank() == who else 0
        self.beats: list[tuple[int, str]] = []

    def __call__(self, step: int, phase: str, patient: bool = False) -> None:  # noqa: ARG002
        self.beats.append((step, phase))
        if (step, phase) == self._when:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGTERM)


def live(folder: str, sets: tuple[str, ...], resume: str | None = None, beat: Any = None) -> str:
    """A run, or its continuation; how it ends, or the text of the error that ends it, with its exit code."""
    asked = load_spec("tiny", sets if any("kind" in one for one in sets) else [*SMALLEST, *sets])
    plan = make_run_plan(asked, dist.get_world_size(), ("test",)).model_copy(update={"resume_from": resume})
    Path(folder).mkdir(exist_ok=True)
    with StopRequest() as stop:
        try:
            return loop.train(plan, joined_here(), RunDir(Path(folder)), stop, beat or (lambda *_: None))
        except FourfoldError as error:
            return "\n".join([f"exit {error.exit_code}", str(error), *getattr(error, "__notes__", [])])


def signalled(folder: str, sets: tuple[str, ...], when: tuple[Any, ...], resume: str | None = None) -> Any:
    """A run with a signal; how it ends, and how many validation batches each step had."""
    beat = Signal(*when)
    ending = live(folder, sets, resume, beat)
    counts: dict[int, int] = {}
    for step, phase in beat.beats:
        if phase == "validation":
            counts[step] = counts.get(step, 0) + 1
    return ending, counts


def signalled_while_opening(folder: str) -> str:
    """A run whose rank 0 is told to stop before it has opened anything."""
    keep = loop.open_training

    @contextmanager
    def told(*args: Any, **kwargs: Any) -> Iterator[Training]:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        with keep(*args, **kwargs) as training:
            yield training

    loop.open_training = told
    try:
        return live(folder, ())
    finally:
        loop.open_training = keep


def on_a_full_disk(folder: str, sets: tuple[str, ...], who: int, place: str, step: int, *when: Any) -> str:
    """A run in which rank `who` finds no room at `place` in the save after `step` (from 1), and in that alone.

    when: the arguments of a Signal.
    """
    keep = saver.save_state

    def save_state(training: Any, run: Any, number: int, *more: Any) -> Path:
        with ExitStack() as held:
            if number + 1 == step and dist.get_rank() == who:
                held.enter_context(no_room(place))
            return keep(training, run, number, *more)

    saver.save_state = save_state
    try:
        return live(folder, sets, beat=Signal(*when) if when else None)
    finally:
        saver.save_state = keep


def on_a_full_record(folder: str, sets: tuple[str, ...], place: str, nth: int) -> str:
    """A run in which rank 0 finds no room for its metrics in the nth save: for a line of them, or to flush the file."""
    keep, marks = Recorder.mark, 0

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def mark(self: Recorder) -> Any:
        nonlocal marks
        marks += 1
        if marks != nth or dist.get_rank() != 0:
            return keep(self)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync" if place == "flush" else "write", refused)
            return keep(self)

    Recorder.mark = mark  # type: ignore[method-assign]
    try:
        return live(folder, sets)
    finally:
        Recorder.mark = keep  # type: ignore[method-assign]


def flushed(folder: str, *sets: str) -> list[tuple[str, float]]:
    """A run; every file that this rank put on disk meanwhile, in order, and when by the machine's clock."""
    keep, found = os.fsync, []

    def fsync(file: int) -> None:
        keep(file)
        found.append((_named(file), time.monotonic()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        live(folder, sets)
    return found


def without_room(folder: str, sets: tuple[str, ...], first: int, last: int) -> tuple[str, list[str]]:
    """A run whose disk has no room for lines of the record from the forward of step `first` to that of `last`.

    How it ends, and what was said of the record on this rank.
    """
    keep, full, said = os.write, False, []

    def write(file: int, data: Any) -> int:
        if full and _named(file).endswith(".jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return keep(file, data)

    def beat(step: int, phase: str, patient: bool = False) -> None:  # noqa: ARG001
        nonlocal full
        full = first <= step < last if phase == "forward" else full

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        patch.setattr(writer, "say", said.append)
        return live(folder, sets, beat=beat), said


def _named(file: int) -> str:
    """The name of an open file."""
    return os.path.basename(os.readlink(f"/proc/self/fd/{file}"))


def with_pruning_refused(folder: str) -> str:
    """A run in which a folder cannot be looked at while pruning is planned."""

    def refused(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "plan_prune", refused)
        return live(folder, ("checkpoint.every=2",))


def beats_of_a_continuation(folder: str, resume: str) -> list[tuple[int, str, bool]]:
    """Every beat of it, in order."""
    beats = []
    live(folder, (), resume, lambda step, phase, patient=False: beats.append((step, phase, patient)))
    return beats


def with_data_lost(folder: str, *sets: str) -> str:
    """A run whose data cannot be read any more when a save looks at the last batch again."""
    keep = saving.observing

    def lost(_: Training) -> Any:
        raise DataError(Problem("read the data", "they are gone", "", ""))

    saving.observing = lost
    try:
        return live(folder, sets)
    finally:
        saving.observing = keep


def by_the_clock(folder: str, *sets: str) -> str:
    """A run whose every step takes 10 s by rank 0's clock; the other ranks' clocks run wild."""
    now = 0.0 if dist.get_rank() == 0 else 1e9

    def beat(step: int, phase: str, patient: bool = False) -> None:  # noqa: ARG001
        nonlocal now
        if phase == "update":
            now += 10.0 if dist.get_rank() == 0 else 1e6

    def clock() -> float:
        return now

    keep = saver.time
    saver.time = types.SimpleNamespace(monotonic=clock, perf_counter=clock)  # type: ignore[assignment]
    try:
        return live(folder, sets, beat=beat)
    finally:
        saver.time = keep


def live_grown(folder: str, sets: tuple[str, ...], resume: str) -> str:
    """The continuation of a run of `Growing` with its second head in place of the first."""
    global GROWN
    GROWN = True
    try:
        return live(folder, sets, resume)
    finally:
        GROWN = False


def unknown_state_of_the_optimizer() -> str:
    """What becomes of a state of the optimizer with a slot more than is known."""
    with open_training(spec(dist.get_world_size()), joined_here()) as training:
        name = next(iter(training.optimizer.trained))
        known = {slot: torch.zeros(()) for slot in ("step", "exp_avg", "exp_avg_sq")}
        training.optimizer.set_state(name, {**known, "max_exp_avg_sq": torch.zeros(())})
        try:
            tensors_of(training)
        except FourfoldError as error:
            return str(error)
    return ""


def checkpoints(folder: str | Path) -> list[int]:
    """The steps of the run's checkpoints, by their manifests; whatever else lies there is an error."""
    return sorted(read_manifest(child).step for child in RunDir(Path(folder)).checkpoints.iterdir())


def newest(folder: str | Path) -> Path:
    return max(RunDir(Path(folder)).checkpoints.iterdir(), key=lambda child: read_manifest(child).step)


def stored(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint, as bytes."""
    held = {}
    for name, record in read_manifest(checkpoint).tensors.items():
        for chunk in record.chunks:
            with safe_open(checkpoint / chunk.file, framework="pt") as file:
                tensor = file.get_tensor(chunk.key).contiguous().view(-1)
            held[f"{name} {chunk.offset}"] = tensor.view(torch.uint8).numpy().tobytes()
    return held


def written(folder: str | Path) -> list[tuple[str, int, float]]:
    """The lines of the metrics: of what, of which step, and the value."""
    lines = map(json.loads, RunDir(Path(folder)).metrics.read_text().splitlines())
    return [
        ("loss", line["step"], line["loss"])
        if "loss" in line
        else ("validation", line["step"], line["validation_loss"])
        for line in lines
    ]


def kinds(folder: Path, rank: int, *wanted: str) -> list[tuple[str, int]]:
    """Kind and step of a rank's events of these kinds."""
    return [(e["kind"], e["step"]) for e in events(str(folder), rank) if e["kind"] in wanted]


def steps_of(folder: Path, what: str) -> list[int]:
    """The steps with a line of metrics of that sort."""
    return [step for kind, step, _ in written(folder) if kind == what]
