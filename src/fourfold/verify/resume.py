"""Resume: is a run that was killed, or stopped, and continued the same run as the undisturbed one, bit for bit?

The trainer's own loop runs on real ranks, in fresh processes for every life of a run: once undisturbed, then
interrupted and continued in several ways (`resume_course.py`), from the checkpoint that `train --resume` would take.
Where something differs, the first deviating value in the order of the run is named, and what it may come from.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

from fourfold.data.source import open_sources
from fourfold.launch.pool import RankPool
from fourfold.plan.run_plan import RunPlan, make_run_plan
from fourfold.record.finding import document, write_findings
from fourfold.record.lock import locked
from fourfold.spec.errors import FourfoldError, RankFailed
from fourfold.spec.load import LoadedSpec
from fourfold.spec.rules import require
from fourfold.spec.settle import data_parallel_degree, settle
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted
from fourfold.train.resume import reopen_run, resumed
from fourfold.train.setup import batch_schedule
from fourfold.train.start import open_run
from fourfold.verify import resume_compare as compared
from fourfold.verify.out import open_folder, open_room
from fourfold.verify.resume_compare import Deviation, Rules
from fourfold.verify.resume_course import Interruption, Scenario, plan_course, shortened
from fourfold.verify.resume_judge import Judge
from fourfold.verify.resume_life import Gap, Loaded, live, look
from fourfold.verify.resume_record import (
    Continuation,
    Trail,
    count_events,
    lay_unfinished_save,
    published,
    read_life,
)
from fourfold.verify.resume_tensors import StoredTensors

SCHEMA = "fourfold.verify.resume/1"
TIMEOUT_S = 600.0  # of one life

_REQUEST = "# cut short for a resume check: spec.json holds what was run\n"
_SECOND_LOOK_CLEAN = (
    "all that the checkpoint of step {} holds was put back as it is: it was saved wrong, or something that it does not "
    "hold changes the run"
)


@dataclass(frozen=True, slots=True)
class _Case:
    """What is run: the Spec, cut short; samples of its training data; ranks; a folder for the runs."""

    spec: Spec
    samples: int
    world: int
    scratch: Path
    setup: str | None
    timeout_s: float

    def plan(self, scenario: Scenario) -> RunPlan:
        """The plan of a scenario's run, in a directory of its own."""
        run = self.spec.run.model_copy(update={"dir": str(self.scratch / scenario.name)})
        data = self.spec.data.model_copy(update={"workers": scenario.workers})
        spec = self.spec.model_copy(update={"run": run, "data": data})
        return make_run_plan(LoadedSpec(spec, {}, _REQUEST), self.world, ("fourfold", "verify", "resume"))

    def run(self, scenario: Scenario, may_refuse: bool = False) -> Trail:
        """A run through all its lives; what goes otherwise than planned ends it, and is told in it.

        may_refuse: what its ranks refuse of the request is raised instead.
        """
        plan = self.plan(scenario)
        trail = Trail(scenario, open_run(plan, _REQUEST))
        for interruption in (*scenario.interruptions, None):
            try:
                going_on = plan if not trail.lives else _go_on(plan, trail)
            except FourfoldError as error:
                trail.failure = f"it cannot go on: {error.problems[0].asked}: {error.problems[0].found}"
                return trail
            first = trail.continuations[-1].chosen if trail.continuations else 0
            before = count_events(trail.run, self.world)
            with locked(trail.run):
                ended, trail.failure = self._live(going_on, interruption, may_refuse)
            trail.lives.append(read_life(trail.run, before, first))
            trail.ended.append(ended)
            if trail.failure:
                return trail
        return trail

    def look(self, trail: Trail, life: int) -> list[Loaded]:
        """What each rank has after loading what this life (from 1) began with; nothing where they cannot tell."""
        plan = self.plan(trail.scenario)
        chosen = trail.continuations[life - 1]
        try:
            with self._pool() as pool:
                return pool.run(
                    look, plan.model_copy(update={"resume_from": str(chosen.folder)}), self.samples
                )
        except RankFailed:
            return []

    def _live(self, plan: RunPlan, interruption: Interruption | None, may_refuse: bool) -> tuple[str, str]:
        """One life, in fresh processes: how it ended, and what of it was not as planned."""
        planned = str(interruption) if interruption else f"finished after step {plan.steps}"
        try:
            with self._pool() as pool:
                endings = set(pool.run(live, plan, self.samples, interruption))
        except RankFailed as failure:
            if may_refuse and (refused := failure.refusal()) is not None:
                raise refused from failure
            found = failure.problems[0].found
            # Not by the exit code: a rank that hung has the same.
            killed = f"rank {self.world - 1} was killed by {SIGKILL.name}" in found
            if killed and interruption is not None and interruption.signal == SIGKILL:
                return planned, ""
            return found, found
        expected = "finished" if interruption is None else "stopped"
        if endings == {expected} and (interruption is None or interruption.signal != SIGKILL):
            return planned, ""
        told = f"{', '.join(sorted(endings))} where {planned} was planned"
        return told, told

    def _pool(self) -> RankPool:
        return RankPool(self.world, timeout_s=self.timeout_s, setup=self.setup)


def _go_on(plan: RunPlan, trail: Trail) -> RunPlan:
    """The plan of the next life, chosen as `fourfold train --resume must` chooses it."""
    newest = max(published(trail.run), default=0)
    if trail.scenario.leftover and trail.aside is None and newest:
        trail.aside = lay_unfinished_save(trail.run)
    going_on = resumed(plan, "must")
    assert going_on is not None and going_on.choice.path is not None, "must: it goes on, or is an error"
    step = StoredTensors(going_on.choice.path).manifest["step"]
    trail.continuations.append(Continuation(newest, step, going_on.choice.path))
    reopen_run(going_on.plan, going_on.run, going_on.choice)
    return going_on.plan


def verify_resume(
    spec: Spec,
    world: int,
    *,
    out: Path | None = None,
    setup: str | None = None,
    timeout_s: float = TIMEOUT_S,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Hold runs that were interrupted and continued on `world` ranks against the undisturbed one.

    spec: settled or not. out: folder for the findings, and for the runs in it (default: the next free
    runs/verify-<name>-<n>); their checkpoints stay only where a check failed. setup: "module:function" called in every
    rank first (tests plant faults with it). timeout_s: of one life. command: to repeat it. say: takes each line of the
    story.
    Returns the document fourfold.verify.resume/1; a rank that fails otherwise than planned is a failed finding.
    Raises SpecError or DataError for a request or data that cannot be trained on, in a rank of the undisturbed run too,
    or a folder that cannot be written.
    """
    settled = settle(spec, world)
    require(settled, "train")
    sources = open_sources(settled)
    available, validates = len(sources.train), sources.validation is not None
    degree = data_parallel_degree(settled.layout)
    batch_schedule(settled, available, degree)  # too few samples are told of as they are
    course = plan_course(settled, available, validates)
    cut, changes = shortened(settled, course, available, validates)
    rules = Rules(cut, batch_schedule(cut, course.samples, degree))
    with open_folder(out, cut.name) as folder, open_room(folder, "resume") as scratch:
        case = _Case(cut, course.samples, world, scratch.absolute(), setup, timeout_s)
        judge = Judge(command, folder.path.absolute())
        trails, first = _runs(case, course.undisturbed, course.scenarios, rules, judge, say)
    if not judge.failed:
        judge.sharpness(settled, course, trails)
    facts: dict[str, Any] = {
        "spec": cut.name,
        "world": world,
        "steps": course.steps,
        "steps_per_epoch": course.epoch_steps,
        "changes": list(changes),
        "scenarios": judge.scenarios,
        "first_deviation": asdict(first) if first is not None else None,
    }
    path = write_findings(folder, "resume", judge.findings, SCHEMA, **facts)
    if not judge.failed:
        for trail in trails:
            shutil.rmtree(trail.run.checkpoints, ignore_errors=True)
    return document(SCHEMA, judge.findings, **facts, findings_file=str(path))


def _runs(
    case: _Case,
    undisturbed: Scenario,
    scenarios: Sequence[Scenario],
    rules: Rules,
    judge: Judge,
    say: Callable[[str], None],
) -> tuple[list[Trail], Deviation | None]:
    """All runs, judged; and the first deviation, looked at again."""
    steps = rules.spec.run.steps
    say(f"undisturbed: {counted(steps, 'step')} on {counted(case.world, 'rank')}")
    right = case.run(undisturbed, may_refuse=True)
    broken = judge.undisturbed(right, rules)
    if broken or right.failure:
        judge.first_deviation(broken[0] if broken else None, "")
        return [right], broken[0] if broken else None
    trails = [right]
    for number, scenario in enumerate(scenarios):
        say(f"{scenario.title}: {'; '.join(map(str, scenario.interruptions))}")
        trail = case.run(scenario)
        trails.append(trail)
        found, holds = judge.trail(trail, right, rules)
        judge.scenario(trail, case.world, holds)
        if holds:
            continue
        judge.not_run(scenarios[number + 1 :])
        say("it is not the same run: a second look at where it begins")
        first, more = _search(case, trail, found)
        judge.first_deviation(first, more)
        if first is None or not first.loading:
            again = case.run(replace(undisturbed, name="undisturbed-again"))
            judge.control(rules.compare(again, right), again.failure)
        return trails, first
    return trails, None


def _search(case: _Case, trail: Trail, found: list[Deviation]) -> tuple[Deviation | None, str]:
    """The first deviation, which may lie in what was loaded before it showed; and what else a second look says."""
    if not found and not trail.failure:
        return None, ""
    life = found[0].life if found else len(trail.lives) - 1
    if life == 0 or life > len(trail.continuations):
        workers = trail.scenario.workers
        before = f"it began before any interruption, with {workers} loader workers" if found else ""
        return (found[0] if found else None), before
    step = trail.continuations[life - 1].chosen
    looks = case.look(trail, life)
    gaps = sorted(
        (_as_deviation(trail, life, step, gap) for loaded in looks for gap in loaded.gaps),
        key=lambda one: one.order,
    )
    refused = next((f"the load refuses it: {one.refused}" for one in looks if one.refused), "")
    if gaps:
        many = f"{len(gaps)} tensors of all ranks were not put back" if len(gaps) > 1 else ""
        return gaps[0], compared.both(many, refused)
    clean = ""
    if looks and not (found and found[0].kind in (compared.IDS, compared.TARGETS, compared.RATE)):
        clean = _SECOND_LOOK_CLEAN.format(step)
    return (found[0] if found else None), compared.both(clean, refused)


def _as_deviation(trail: Trail, life: int, step: int, gap: Gap) -> Deviation:
    manifest = StoredTensors(trail.continuations[life - 1].folder).manifest
    kind = compared.kind_of(gap.name, manifest)
    at, saved, held, many = gap.difference
    place = (trail.scenario.title, life, step, kind, gap.rank, gap.name + at)
    return Deviation(*place, saved, held, compared.both(gap.note, many), loading=True)
