"""Whether a run goes on from a checkpoint, from which one, and why not from a newer: decided while no rank lives."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fourfold.checkpoint.choose import Choice, PassedOver, look, newest_valid
from fourfold.checkpoint.hold import in_use
from fourfold.checkpoint.listing import SET_ASIDE
from fourfold.checkpoint.publish import discard, step_name, try_out
from fourfold.launch.restarts import Point, started_again
from fourfold.plan.run_plan import RunPlan
from fourfold.record.lock import locked
from fourfold.record.problems import unwritable
from fourfold.record.reader import RunReader, read_lines
from fourfold.record.rewind import keep_lines_until, set_findings_aside
from fourfold.record.run_dir import RunDir, is_empty, next_free_beside
from fourfold.record.writer import write_json
from fourfold.spec.errors import DataError, Problem, SpecError
from fourfold.spec.training import EXACT_THREADS
from fourfold.spec.words import counted

Resume = Literal["auto", "must", "never"]

# What may differ between a run and its continuation: how it is watched and kept. Not run.steps: the learning rate of
# every step depends on it.
FREE = frozenset(
    [
        "note",
        "run.dir",
        "layout.offload_dir",
        "run.log_every",
        "run.check_every",
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


# In exact mode the bits do not depend on these either: how many ranks there are, and what each of them holds. On the
# number of threads they do.
FREE_IN_EXACT = frozenset(["layout.dp_replicate", "layout.dp_shard", "layout.zero", "batch.accumulation"])


@dataclass(frozen=True, slots=True)
class GoingOn:
    """A run that goes on: its plan from here, its directory, and the checkpoint that was chosen, if it has any.

    finished: it came to its end, and there is nothing to go on with.
    """

    plan: RunPlan
    run: RunDir
    choice: Choice
    finished: bool = False

    @property
    def told(self) -> str:
        """In words, from where."""
        if self.finished:
            steps = self.plan.steps
            return f"{self.run.path} is finished: step {steps} of {steps}, nothing to do"
        if self.choice.path is None:
            return f"begins anew in {self.run.path}: no checkpoint was saved yet"
        return f"goes on from {self.choice.path}"

    @property
    def story(self) -> tuple[str, ...]:
        """The same after a line for each folder that was not taken, and why."""
        return (*(f"passed over {path}: {reason}" for path, reason in self.choice.passed_over), self.told)


def resumed(plan: RunPlan, resume: Resume) -> GoingOn | None:
    """The plan that goes on from the newest valid checkpoint of `run.dir`; None if the run begins anew.

    "never": always anew. "must": a checkpoint, or DataError. "auto": anew where there is no such directory, or nothing
    in it; in the same directory if it was killed before its first save. A finished run is neither: `finished` says so,
    unless what it saved is gone or damaged. Nothing is written.
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
    if resume == "auto" and (not run.path.exists() or is_empty(run.path)):
        return None
    if resume == "must" and not run.path.exists():
        raise DataError(_no_run(run))
    reader = RunReader(run.path)
    before = reader.spec().model_dump(mode="json")
    world = reader.plan().get("world", plan.world)
    if world != plan.world and not plan.spec.run.exact:
        raise SpecError(_another_world(run, world, plan.world))
    differing = differences(before, plan.spec.model_dump(mode="json"))
    if differing:
        raise SpecError([_differs(run, *difference) for difference in differing])
    choice = newest_valid(run.checkpoints)
    saved = choice.path is not None or _was_saved(run, choice)
    finished = (choice.step == plan.steps or not saved) and _is_finished(run, world)
    if choice.path is None and not finished and (saved or resume == "must"):
        raise DataError(_none(run, choice.passed_over, saved))
    resume_from = None if choice.path is None else str(choice.path)
    return GoingOn(plan.model_copy(update={"resume_from": resume_from}), run, choice, finished)


def chosen(plan: RunPlan, resume: Resume, held: ExitStack) -> GoingOn | None:
    """`resumed`, under the lock of the run that goes on, which `held` keeps.

    Nobody saves, prunes or goes on with that run between the choice and what follows from it.
    Raises SpecError also where another run is at work in the directory.
    """
    wanted = plan.spec.run.dir
    if resume != "never" and wanted is not None and RunDir(Path(wanted)).is_run:
        held.enter_context(locked(RunDir(Path(wanted))))
    return resumed(plan, resume)


def reopen_run(plan: RunPlan, run: RunDir, choice: Choice) -> None:
    """Write the new plan into the run's directory; the request of the first start stays.

    If the run begins anew, the metrics do, too. Findings about the run as it was, and what stands in the way of a later
    save, are set aside under other names, whole. Raises DataError where no checkpoint could be saved, or nothing
    written.
    """
    try_out(run.checkpoints)
    write_json(run.plan_json, plan)
    started_again(run)
    set_findings_aside(run)
    if plan.resume_from is None:
        keep_lines_until(run.metrics, 0)
    for path in _in_the_way(run, choice):
        aside = path.with_name(f"{SET_ASIDE}{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            path.rename(aside)
        except OSError as error:
            raise unwritable(
                path, error, "set aside what is no checkpoint of this run", "it is as it was"
            ) from error


def _in_the_way(run: RunDir, choice: Choice) -> list[Path]:
    """Whatever has the name of a checkpoint and is not one, or not that of its step: the run will save those steps."""
    whole = {
        saved.path
        for saved in look(run.checkpoints).saved
        if saved.path.name == step_name(saved.manifest.step)
    }
    whole -= {path for path, _ in choice.passed_over}
    return sorted(path for path in run.checkpoints.glob("step-*") if path not in whole)


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


def _is_finished(run: RunDir, world: int) -> bool:
    """Whether every rank's newest event is that it came to the end of the last step, with the validation after it."""
    return all(_last_event(run.events(rank)).get("ending") == "finished" for rank in range(world))


def _last_event(path: Path) -> dict[str, Any]:
    """{} where there is none, or where it is longer than an "end"."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            line = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return line if isinstance(line, dict) else {}


def _was_saved(run: RunDir, choice: Choice) -> bool:
    """Whether a save ever succeeded; where nothing was chosen it is damaged now, or somebody took it away."""
    there = any(passed.path.name.startswith("step-") for passed in choice.passed_over)
    return there or any(line.get("kind") == "saved" for line in _lines(run.events(0)))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return read_lines(path) if path.exists() else iter(())


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What makes two settled Specs (as JSON has them) those of different runs: setting, before, after."""
    exact = before["run"]["exact"] and after["run"]["exact"]
    free = FREE | FREE_IN_EXACT if exact else FREE
    found = [
        (key, one, other)
        for key, one, other in _unlike(before, after, "")
        if not (key in free or key.startswith("hardware."))
    ]
    one, other = (values["hardware"]["threads_per_rank"] or EXACT_THREADS for values in (before, after))
    return [*found, ("hardware.threads_per_rank", one, other)] if exact and one != other else found


def _unlike(before: Any, after: Any, at: str) -> list[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return [
            found
            for key in sorted(before.keys() | after.keys())
            for found in _unlike(before.get(key), after.get(key), f"{at}.{key}" if at else key)
        ]
    return [] if before == after else [(at, before, after)]


def _differs(run: RunDir, key: str, before: Any, after: Any) -> Problem:
    return Problem(
        asked=f"go on with {run.path} under {key} = {after!r}",
        found=f"it was started with {key} = {before!r}",
        why="that would be another run from here on, not the same one",
        instead="the same Spec, or another run.dir",
    )


def _no_run(run: RunDir) -> Problem:
    return Problem(
        asked=f"go on with the run in {run.path}",
        found="nothing has that name",
        why="--resume must begins no run",
        instead="--resume auto  (begins it), or the run.dir of a run that was begun",
    )


def _another_world(run: RunDir, before: int, now: int) -> Problem:
    return Problem(
        asked=f"go on with {run.path} on {counted(now, 'rank')}",
        found=f"it was started on {before}",
        why="sums of gradients would have other bits: only in exact mode (run.exact = true from its beginning) is it "
        "the same run on another number of ranks",
        instead=f"--nproc {before}",
    )


def _none(run: RunDir, passed_over: Sequence[PassedOver], saved: bool = True) -> Problem:
    """saved: it had a checkpoint once."""
    passed = "; ".join(f"{path.name}: {reason}" for path, reason in passed_over)
    if saved:
        why = "it goes on from a complete and valid checkpoint only, and those that it saved are gone or damaged"
        instead = f"--resume never --set run.dir={next_free_beside(run.path)}  (a new run)"
    else:
        why = "it goes on from a checkpoint only, and ended before it saved one"
        instead = "--resume auto  (begins it anew, in the same directory)"
    return Problem(f"go on with {run.path}", passed or "no checkpoint in it", why, instead)
