"""Three steps of a Spec, with a save, a resume and the proof of both: will the long run start, save and go on?

The Spec itself is run, by the launcher that trains it: its model, data, layout, precision and device. What it saved
after step 2 goes on to step 3 a second time, in fresh processes, and must arrive at the same bits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fourfold.data.source import open_sources
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan
from fourfold.record.finding import Finding, document, write_findings
from fourfold.record.lock import locked
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import FourfoldError
from fourfold.spec.load import LoadedSpec
from fourfold.spec.settle import data_parallel_degree
from fourfold.spec.words import counted
from fourfold.train.resume import reopen_run, resumed
from fourfold.train.setup import batch_schedule
from fourfold.train.start import open_run, start
from fourfold.verify.coverage import run_coverage
from fourfold.verify.resume_compare import Deviation, Rules
from fourfold.verify.resume_course import EVERY, Scenario, cut_schedule
from fourfold.verify.resume_judge import Judge
from fourfold.verify.resume_record import Continuation, Trail, count_events, published, read_life

SCHEMA = "fourfold.smoke/1"
STEPS = EVERY + 1  # one after the save
ASIDE = "undisturbed"  # in the run directory: what the first processes made of the last step


class Stopped(Exception):
    """A signal came: nothing was shown."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def smoke_spec(loaded: LoadedSpec) -> tuple[LoadedSpec, tuple[str, ...]]:
    """The Spec as it is tried, and what was changed, in words.

    Only its length, how it is watched and kept, and a decay that is longer than the trial; its run directory is
    `run.dir`, or the next free runs/<name>-smoke-<n>.
    """
    spec = loaded.spec
    changed: dict[str, dict[str, object]] = {
        "run": {"steps": STEPS, "log_every": 1, "validate_every": 0, "validation_batches": 1},
        "checkpoint": {"every": EVERY, "every_s": 0.0, "keep_last": STEPS, "on_error": "stop"},
        "optimizer": cut_schedule(spec.optimizer, STEPS),
    }
    words = tuple(
        f"{section}.{key} {before} -> {value}"
        for section, entries in changed.items()
        for key, value in entries.items()
        if (before := getattr(getattr(spec, section), key)) != value
    )
    sections: dict[str, Any] = {
        section: getattr(spec, section).model_copy(update=entries) for section, entries in changed.items()
    }
    short = spec.model_copy(update={**sections, "name": f"{spec.name}-smoke"})
    return LoadedSpec(short, loaded.provenance, loaded.text, loaded.notes), words


def smoke(
    plan: RunPlan,
    text: str,
    stop: StopRequest,
    *,
    changes: Sequence[str],
    command: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the plan of a `smoke_spec` in a new run directory, go on with it from its save, and audit both.

    text: the TOML that was asked with. stop: a wish to stop, the ranks' own too. changes: as of `smoke_spec`.
    command: to repeat it. say: takes each line of the story.
    Returns the document fourfold.smoke/1; ranks that fail are a failed finding, told on stderr as `start` tells them.
    Raises Stopped where a signal came; SpecError or DataError for a request or data that cannot be trained on, and then
    no run directory is left.
    """
    samples = len(open_sources(plan.spec).train)
    rules = Rules(plan.spec, batch_schedule(plan.spec, samples, data_parallel_degree(plan.spec.layout)))
    run = open_run(plan, text)
    say(f"run directory {run.path}")
    trial = _Trial(plan, run, rules, Judge(command, run.path), stop)
    with locked(run):
        say(f"1/3  {STEPS} steps on {counted(plan.world, 'rank')}, saved after step {EVERY}")
        right = trial.undisturbed()
        if not trial.judge.failed:
            say(f"2/3  from the checkpoint of step {EVERY} again to step {STEPS}, in fresh processes")
            trial.resumed(right)
    findings, files = trial.judge.findings, []
    facts: dict[str, Any] = {"spec": plan.spec.name, "world": plan.world, "steps": STEPS, "saved": EVERY}
    facts |= {"changes": list(changes), "first_deviation": trial.first_deviation}
    if not trial.failure:
        say("3/3  coverage: the samples that it read, from its own record")
        covered = run_coverage(run.path, command=f"fourfold verify coverage {run.path}")
        files.append(covered["findings_file"])
        covering = [Finding.model_validate(entry) for entry in covered["findings"]]
    else:
        covering = []
    files.insert(0, str(write_findings(run, "smoke", findings, SCHEMA, **facts)))
    if not trial.judge.failed:
        shutil.rmtree(run.path / ASIDE, ignore_errors=True)
    return document(SCHEMA, [*findings, *covering], run=str(run.path), **facts, findings_files=files)


@dataclass(slots=True)
class _Trial:
    """The two lives of the run. failure: what went otherwise than planned in one, "" if nothing did."""

    plan: RunPlan
    run: RunDir
    rules: Rules
    judge: Judge
    stop: StopRequest
    failure: str = ""
    first_deviation: Mapping[str, Any] | None = None

    def undisturbed(self) -> Trail:
        """All steps; what they came to is kept aside, as the standard for the second time."""
        trail = Trail(Scenario(ASIDE, "undisturbed"), self.run)
        self._live(self.plan, trail, 0)
        self._tell_first(self.judge.undisturbed(trail, self.rules))
        return trail

    def resumed(self, first: Trail) -> None:
        """Back to what was saved before the last step, and on from there: judged against the first time."""
        right = self._set_aside(first)
        trail = Trail(Scenario("resumed", f"resumed after step {EVERY}"), self.run, [*first.lives])
        try:
            self._go_on(trail)
        except FourfoldError as error:
            trail.failure = self.failure = f"{error.problems[0].asked}: {error.problems[0].found}"
        found, _ = self.judge.trail(trail, right, self.rules)
        self._tell_first(found)

    def _tell_first(self, found: Sequence[Deviation]) -> None:
        if found:
            self.judge.first_deviation(found[0], "")
            self.first_deviation = asdict(found[0])

    def _go_on(self, trail: Trail) -> None:
        """As `fourfold train --resume must` does."""
        here = self.plan.spec.run.model_copy(update={"dir": str(self.run.path)})
        plan = self.plan.model_copy(update={"spec": self.plan.spec.model_copy(update={"run": here})})
        going_on = resumed(plan, "must")
        assert going_on is not None and going_on.choice.path is not None, "must: it goes on, or is an error"
        newest, chosen = max(published(self.run), default=0), going_on.choice
        assert chosen.path is not None and chosen.step is not None
        trail.continuations.append(Continuation(newest, chosen.step, chosen.path))
        reopen_run(going_on.plan, self.run, chosen)
        self._live(going_on.plan, trail, chosen.step)

    def _set_aside(self, first: Trail) -> Trail:
        """The last checkpoint and the metrics, out of the way of the second time: as if it had been killed before."""
        kept = RunDir(self.run.path / ASIDE)
        kept.checkpoints.mkdir(parents=True)
        for step, folder in published(self.run).items():
            if step > EVERY:
                folder.rename(kept.checkpoints / folder.name)
        for file, copy in ((self.run.spec_json, kept.spec_json), (self.run.metrics, kept.metrics)):
            shutil.copyfile(file, copy)
        return Trail(first.scenario, kept, first.lives)

    def _live(self, plan: RunPlan, trail: Trail, done: int) -> None:
        """One set of processes, from the step after `done` to the last; what they leave is read."""
        before = count_events(self.run, plan.world)
        outcome = start(plan, self.run, self.stop, new=not trail.lives)
        if self.stop.signal is not None and outcome.exit_code != 0:
            raise Stopped(self.stop.signal)
        trail.lives.append(read_life(self.run, before, done))
        if outcome.exit_code == 0:
            trail.ended.append(f"finished after step {plan.steps}")
            return
        cause = outcome.failures[0].headline.partition("\n")[0] if outcome.failures else outcome.told
        trail.failure = self.failure = cause or f"exit code {outcome.exit_code}"
