"""From the runs of a resume check to findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.checkpoint.validate import validate
from fourfold.record.finding import Finding, fact, not_tested, verdict_of
from fourfold.spec.spec import Spec
from fourfold.verify import resume_compare as compared
from fourfold.verify.resume_compare import Deviation, Rules
from fourfold.verify.resume_course import EVERY, Course, Scenario
from fourfold.verify.resume_record import Trail, leftovers, published, written

_IN_STEPS = (compared.RATE, compared.SCALE, compared.LOSS, compared.NORM)
_IN_CHECKPOINTS = compared.KINDS[
    compared.KINDS.index(compared.PARAMETER) : compared.KINDS.index(compared.PROBE) + 1
]


@dataclass(slots=True)
class Judge:
    """Findings of one resume check, and its scenarios. folder: what the evidence's paths are relative to."""

    command: str
    folder: Path
    findings: list[Finding] = field(default_factory=list)
    scenarios: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(finding.verdict == "fail" for finding in self.findings)

    def undisturbed(self, trail: Trail, rules: Rules) -> list[Deviation]:
        """The run that all others are held against does what the Spec says. Returns where it does not."""
        self._ends(trail, rules.spec)
        broken = rules.broken_by(trail)
        self._fact(
            trail,
            "sample ids, learning rates and data positions are what the Spec says, by arithmetic",
            broken,
            f"{len(trail.lives[0].steps)} steps",
            len(trail.lives[0].steps) == rules.spec.run.steps,
        )
        return broken

    def trail(self, trail: Trail, undisturbed: Trail, rules: Rules) -> tuple[list[Deviation], bool]:
        """An interrupted run against the undisturbed one: where they deviate, in order; and whether all of it holds."""
        before = len(self.findings)
        self._ends(trail, rules.spec)
        self._continuations(trail)
        found = [*rules.broken_by(trail), *rules.compare(trail, undisturbed)]
        found = compared.in_order(found)
        steps = sum(len(life.steps) for life in trail.lives)
        done = f"{steps} steps in {len(trail.lives)} lives"
        kinds: tuple[tuple[str, tuple[str, ...], str, bool], ...] = (
            ("sample ids of every rank and step", (compared.IDS, compared.TARGETS), done, steps > 0),
            ("learning rate, loss and gradient norm of every step", _IN_STEPS, done, steps > 0),
            self._of_checkpoints(trail, undisturbed),
        )
        for what, which, much, enough in kinds:
            self._fact(trail, what, [one for one in found if one.kind in which], much, enough)
        passes = sum(len(life.validations) for life in trail.lives)
        if undisturbed.lives[0].validations:
            deviating = [one for one in found if one.kind == compared.VALIDATION]
            self._fact(trail, "every validation", deviating, f"{passes} passes", passes > 0)
        if not trail.failure:
            self._one_record(trail, undisturbed)
            self._nothing_left(trail, rules.spec)
        return found, verdict_of(self.findings[before:]) == "pass"

    def first_deviation(self, found: Deviation | None, more: str) -> None:
        """Where it begins. more: what a second look has shown, if anything."""
        first = (
            f"{found.run}: {found}" if found is not None else "no value: what the run did is not as planned"
        )
        self._add(
            "the first deviating value, in the order of the run",
            "none: a continued run is the undisturbed one",
            compared.both(first, more),
            False,
        )

    def not_run(self, scenarios: Sequence[Scenario]) -> None:
        """What was left out once a scenario had failed."""
        for scenario in scenarios:
            self._open(
                f"a run {scenario.title}", "an earlier one has failed: it was not run", "this check again"
            )

    def control(self, found: Sequence[Deviation], failure: str) -> None:
        """A second undisturbed run against the first."""
        measured = failure or (str(found[0]) if found else "equal in every bit")
        self._add("two undisturbed runs are the same", "equal", measured, not found and not failure)

    def sharpness(self, spec: Spec, course: Course, trails: Sequence[Trail]) -> None:
        """What the check was able to see, and what it was not."""
        edges = (course.steps - 1) // course.epoch_steps
        measured = f"{edges} in {course.steps} steps, epochs of {course.epoch_steps}"
        self._add("the check is sharp: epochs end", "two times or more", measured, edges >= 2)
        at_edge = [
            one.chosen
            for trail in trails
            for one in trail.continuations
            if one.chosen % course.epoch_steps == 0
        ]
        self._add(
            "the check is sharp: a run goes on from a checkpoint at an epoch's edge",
            f"from step {course.edge}",
            f"from step {', '.join(map(str, at_edge))}" if at_edge else "none did",
            bool(at_edge),
        )
        if not course.twice:
            self._open(
                "a run killed twice inside one epoch",
                f"an epoch has {course.epoch_steps} steps, and a checkpoint comes every {EVERY}",
                "more data, or a smaller batch.global_batch",
            )
        if spec.optimizer.schedule == "constant" and spec.optimizer.warmup_steps < EVERY:
            self._open(
                "a learning rate that goes on where it was",
                "it is the same in every step that was continued",
                "--set optimizer.schedule=cosine",
            )
        if spec.hardware.device == "cuda":
            self._open("the same on CUDA devices", "the check runs on the CPU", "the check on such a device")

    def scenario(self, trail: Trail, world: int, holds: bool) -> None:
        """A scenario's entry in the document."""
        entry = {
            "name": trail.scenario.name,
            "title": trail.scenario.title,
            "workers": trail.scenario.workers,
            "interruptions": [
                {"signal": one.signal.name, "step": one.step, "phase": one.phase, "rank": world - 1}
                for one in trail.scenario.interruptions
            ],
            "continued_from": [one.chosen for one in trail.continuations],
            "verdict": "pass" if holds else "fail",
        }
        self.scenarios.append(entry)

    def _ends(self, trail: Trail, spec: Spec) -> None:
        planned = [*map(str, trail.scenario.interruptions), f"finished after step {spec.run.steps}"]
        self._add(
            f"{trail.scenario.title}: every life ends as planned",
            "; ".join(planned),
            trail.failure or "; ".join(trail.ended),
            not trail.failure,
            self._evidence(trail.run.log),
        )

    def _continuations(self, trail: Trail) -> None:
        begun = [
            min((step for by_step in life.ids for step in by_step), default=0) for life in trail.lives[1:]
        ]
        taken = trail.continuations
        holds = all(one.chosen == one.newest for one in taken) and all(
            first == one.chosen + 1 or (trail.failure and not first)
            for one, first in zip(taken, begun, strict=False)
        )
        measured = "; ".join(
            f"from step {one.chosen}, published up to {one.newest}, on with step {first or 'none'}"
            for one, first in zip(taken, [*begun, 0], strict=False)
        )
        if trail.aside is not None:
            measured += f"; {trail.aside.name}, of a later step and never published, was not taken for one"
        self._add(
            f"{trail.scenario.title}: no committed step is lost",
            "each continuation takes the newest published checkpoint and goes on with the step after it",
            measured or "no continuation",
            holds and bool(taken),
            self._evidence(trail.run.events_dir),
        )

    def _of_checkpoints(self, trail: Trail, undisturbed: Trail) -> tuple[str, tuple[str, ...], str, bool]:
        both = published(trail.run).keys() & published(undisturbed.run).keys()
        what = "every tensor of every checkpoint, its position and its probe loss"
        return what, _IN_CHECKPOINTS, f"{len(both)} checkpoints, of step {_several(both)}", bool(both)

    def _one_record(self, trail: Trail, undisturbed: Trail) -> None:
        expected, found = written(undisturbed.run), written(trail.run)
        pairs = zip([*expected, "the end"], [*found, "the end"], strict=False)
        differing = next((f"{one} in place of {right}" for right, one in pairs if one != right), "")
        self._add(
            f"{trail.scenario.title}: its metrics read as those of one run",
            f"{len(expected)} lines, each once and in order",
            differing or f"{len(found)} lines, each once and in order",
            not differing,
            self._evidence(trail.run.metrics),
        )

    def _nothing_left(self, trail: Trail, spec: Spec) -> None:
        due = {*range(EVERY, spec.run.steps, EVERY), spec.run.steps}
        there = published(trail.run)
        # A stop saves, too, and a run goes on from there.
        due |= {one.chosen for one in trail.continuations}
        broken = [
            f"{folder.name}: {problem.found}" for folder in there.values() for problem in validate(folder)
        ]
        odd = [*leftovers(trail.run), *broken]
        if due != set(there):
            odd.append(f"checkpoints of step {_several(there)}")
        self._add(
            f"{trail.scenario.title}: nothing is left behind",
            f"whole checkpoints of step {_several(due)}, and nothing beside them",
            "; ".join(odd) or "nothing else",
            not odd,
            self._evidence(trail.run.log),
        )

    def _fact(self, trail: Trail, what: str, deviating: Sequence[Deviation], much: str, enough: bool) -> None:
        measured = f"equal: {much}" if enough else f"too little to compare: {much}"
        if deviating:
            measured = f"{deviating[0]}; {len(deviating)} values in all"
        self._add(
            f"{trail.scenario.title}: {what}",
            "equal in every bit",
            measured,
            enough and not deviating,
            self._evidence(trail.run.metrics),
        )

    def _evidence(self, path: Path) -> str:
        return str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else str(path)

    def _add(self, claim: str, expected: str, measured: str, holds: bool, evidence: str = "") -> None:
        more = {"evidence": evidence, "command": self.command}
        self.findings.append(fact(claim, expected, measured, holds, **more))

    def _open(self, claim: str, why: str, would_test: str) -> None:
        self.findings.append(not_tested(claim, why, would_test))


def _several(steps: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"
