"""Whether a run goes on from a checkpoint, from which one, and why not from a newer: decided before anything starts."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fourfold.checkpoint.choose import Choice, newest_valid
from fourfold.plan.run_plan import RunPlan
from fourfold.record.problems import unwritable
from fourfold.record.reader import RunReader
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
        "checkpoint.keep_last",
        "checkpoint.keep_every",
        "data.workers",
    ]
)


@dataclass(frozen=True, slots=True)
class GoingOn:
    """A run that goes on: its plan from here, its directory, and the checkpoint that was chosen."""

    plan: RunPlan
    run: RunDir
    choice: Choice


def resumed(plan: RunPlan, resume: Resume) -> GoingOn | None:
    """The plan that goes on from the newest valid checkpoint of `run.dir`; None if the run begins anew.

    "never": always anew. "auto": anew where the directory does not exist. "must": a checkpoint, or DataError.
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
    if not run.path.exists() and resume == "auto":
        return None
    differing = _differences(
        RunReader(run.path).spec().model_dump(mode="json"), plan.spec.model_dump(mode="json")
    )
    if differing:
        raise SpecError([_differs(run, *difference) for difference in differing])
    choice = newest_valid(run.checkpoints)
    if choice.path is None:
        raise DataError(_none(run, choice))
    return GoingOn(plan.model_copy(update={"resume_from": str(choice.path)}), run, choice)


def reopen_run(plan: RunPlan, run: RunDir, choice: Choice) -> None:
    """Write the new plan into the run's directory; the request of the first start stays.

    Damaged checkpoints that were passed over are set aside under another name, whole, so that the run can save those
    steps again.
    """
    write_json(run.plan_json, plan)
    for path, _ in choice.passed_over:
        if path.name.startswith("step-") and path.is_dir():
            aside = path.with_name(f".damaged-{path.name}-{uuid.uuid4().hex[:8]}")
            try:
                path.rename(aside)
            except OSError as error:
                raise unwritable(
                    path, error, "set the damaged checkpoint aside", "it is as it was"
                ) from error


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


def _none(run: RunDir, choice: Choice) -> Problem:
    passed = "; ".join(f"{path.name}: {reason}" for path, reason in choice.passed_over)
    return Problem(
        asked=f"go on with {run.path}",
        found=passed or "no checkpoint in it",
        why="a run goes on from a complete and valid checkpoint only",
        instead="--resume never and another run.dir, with --set checkpoint.every=N",
    )
