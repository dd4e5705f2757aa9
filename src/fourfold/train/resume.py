"""Whether a run goes on from a checkpoint, from which one, and why not from a newer: decided while no rank lives."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fourfold.checkpoint.choose import Choice, PassedOver, look, newest_valid
from fourfold.checkpoint.hold import in_use
from fourfold.checkpoint.publish import discard, try_out
from fourfold.launch.restarts import Point
from fourfold.plan.run_plan import RunPlan
from fourfold.record.environment import environment
from fourfold.record.problems import unwritable
from fourfold.record.reader import RunReader, read_lines
from fourfold.record.rewind import keep_lines_until
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import write_json
from fourfold.spec.errors import DataError, Problem, SpecError

Resume = Literal["auto", "must", "never"]

# What may differ between a run and its continuation: how it is watched and kept. Not run.steps: the learning rate of
# every step depends on it.
FREE = frozenset(
    [
        "note",
        "run.dir",
        "run.log_every",
        "run.validate_every",
        "run.validation_batches",
        "run.timeout_s",
        "run.grace_s",
        "checkpoint.every",
        "checkpoint.every_s",
        "checkpoint.keep_last",
        "checkpoint.keep_every",
        "checkpoint.keep_every_s",
        "checkpoint.on_error",
        "checkpoint.allow_missing",
        "checkpoint.allow_surplus",
        "data.workers",
    ]
)


@dataclass(frozen=True, slots=True)
class GoingOn:
    """A run that goes on: its plan from here, its directory, and the checkpoint that was chosen, if it has any."""

    plan: RunPlan
    run: RunDir
    choice: Choice

    @property
    def told(self) -> str:
        """In words, from where."""
        if self.choice.path is None:
            return f"begins anew in {self.run.path}: no checkpoint was saved yet"
        return f"goes on from {self.choice.path}"


def resumed(plan: RunPlan, resume: Resume) -> GoingOn | None:
    """The plan that goes on from the newest valid checkpoint of `run.dir`; None if the run begins anew.

    "never": always anew. "must": a checkpoint, or DataError. "auto": anew where the directory does not exist, or its
    start was killed before it held the request (what there is of it is removed); in the same directory if it was
    killed before its first save.
    Raises SpecError for a directory of another run, naming every setting that differs; DataError for a run without a
    valid checkpoint.
    """
    if resume == "never":
        return None
    wanted = plan.spec.run.dir
    if wanted is None:
        raise SpecError(
            Problem(
                asked=f"--resume {resume}",
                found="no run.dir",
                why="without a name every start takes the next free one: there is nothing to go on from",
                instead=f"--set run.dir=runs/{plan.spec.name}-1",
            )
        )
    run = RunDir(Path(wanted))
    if resume == "auto" and (_cleared(run) or not run.path.exists()):
        return None
    differing = _differences(
        RunReader(run.path).spec().model_dump(mode="json"), plan.spec.model_dump(mode="json")
    )
    if differing:
        raise SpecError([_differs(run, *difference) for difference in differing])
    choice = newest_valid(run.checkpoints)
    if choice.path is None and not (resume == "auto" and _may_begin_anew(plan, run, choice)):
        raise DataError(_none(run, choice.passed_over))
    resume_from = None if choice.path is None else str(choice.path)
    return GoingOn(plan.model_copy(update={"resume_from": resume_from}), run, choice)


def reopen_run(plan: RunPlan, run: RunDir, choice: Choice) -> None:
    """Write the new plan into the run's directory; the request of the first start stays.

    If the run begins anew, the metrics do, too. Damaged checkpoints that were passed over are set aside under another
    name, whole, so that the run can save those steps again. Raises DataError where no checkpoint could be saved, or
    nothing written.
    """
    try_out(run.checkpoints)
    write_json(run.plan_json, plan)
    if not run.env_json.exists():  # the first start was killed before it had written it
        write_json(run.env_json, environment())
    if plan.resume_from is None:
        keep_lines_until(run.metrics, 0)
    for path, _ in choice.passed_over:
        if path.name.startswith("step-") and path.is_dir():
            aside = path.with_name(f".damaged-{path.name}-{uuid.uuid4().hex[:8]}")
            try:
                path.rename(aside)
            except OSError as error:
                raise unwritable(
                    path, error, "set the damaged checkpoint aside", "it is as it was"
                ) from error


def next_point(plan: RunPlan, run: RunDir) -> Point:
    """Where the run goes on when its ranks have failed: after its newest valid checkpoint, or anew if it saved none.

    Raises DataError where something was saved, and nothing of it is whole.
    """
    choice = newest_valid(run.checkpoints)
    if choice.path is None and _was_saved(run, choice):
        raise DataError(_none(run, choice.passed_over))
    if choice.path is None:
        told = "begins anew: no checkpoint was saved yet"
    else:
        told = f"goes on after step {choice.step}, from {choice.path}"
    for path, reason in choice.passed_over:
        if path.name.startswith("step-"):
            told += f" (passed over {path}: {reason})"
    return Point(choice.step or 0, told, partial(_go_back, plan, run, choice))


def _go_back(plan: RunPlan, run: RunDir, choice: Choice) -> None:
    """Make the run's directory ready for ranks that go on from what was chosen. No rank of it lives."""
    resume_from = None if choice.path is None else str(choice.path)
    reopen_run(plan.model_copy(update={"resume_from": resume_from}), run, choice)
    for folder in look(run.checkpoints).saving:
        if not in_use(folder):
            discard(folder)


def _cleared(run: RunDir) -> bool:
    """Whether this was the directory of a start that was killed before the request was in it; it is removed then."""
    if run.is_run or not run.path.is_dir():
        return False
    remains = list(run.path.iterdir())
    of_a_start = (run.spec_toml.name, f".{run.spec_toml.name}.", f".{run.spec_json.name}.")
    if not all(path.name.startswith(of_a_start) for path in remains):
        return False  # somebody's own directory
    try:
        for path in remains:
            path.unlink(missing_ok=True)  # under torchrun every rank is at it
        with suppress(FileNotFoundError):
            run.path.rmdir()
    except OSError as error:
        raise unwritable(run.path, error, "remove what a killed start left", "it holds no run yet") from error
    return True


def _may_begin_anew(plan: RunPlan, run: RunDir, choice: Choice) -> bool:
    """Whether nothing is lost by that: no save ever succeeded, and either none was due yet or no step was done."""
    if _was_saved(run, choice):
        return False
    asked = plan.spec.checkpoint
    return asked.every > 0 or asked.every_s > 0 or not any(True for _ in _lines(run.metrics))


def _was_saved(run: RunDir, choice: Choice) -> bool:
    """Whether a save ever succeeded; where nothing was chosen it is damaged now, or somebody took it away."""
    there = any(passed.path.name.startswith("step-") for passed in choice.passed_over)
    return there or any(line.get("kind") == "saved" for line in _lines(run.events(0)))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return read_lines(path) if path.exists() else iter(())


def _differences(before: Any, after: Any, at: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            found
            for key in sorted(before.keys() | after.keys())
            for found in _differences(before.get(key), after.get(key), f"{at}.{key}" if at else key)
        ]
    return [] if before == after or at in FREE or at.startswith("hardware.") else [(at, before, after)]


def _differs(run: RunDir, key: str, before: Any, after: Any) -> Problem:
    return Problem(
        asked=f"go on with {run.path} under {key} = {after!r}",
        found=f"it was started with {key} = {before!r}",
        why="that would be another run from here on, not the same one",
        instead="the same Spec, or another run.dir",
    )


def _none(run: RunDir, passed_over: Sequence[PassedOver]) -> Problem:
    passed = "; ".join(f"{path.name}: {reason}" for path, reason in passed_over)
    return Problem(
        asked=f"go on with {run.path}",
        found=passed or "no checkpoint in it",
        why="a run goes on from a complete and valid checkpoint only",
        instead="--resume never and another run.dir, with --set checkpoint.every=N",
    )
