"""The demonstration: train a small decoder on real text on several ranks, and show that the run is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.lab.report import build_report
from fourfold.plan.run_plan import RunPlan, make_run_plan
from fourfold.record.finding import Finding, verdict_of, write_findings
from fourfold.record.run_dir import RunDir
from fourfold.spec.degrees import nearest_divisors
from fourfold.spec.errors import SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.rules import require
from fourfold.spec.words import counted
from fourfold.train.start import start
from fourfold.verify.coverage import run_coverage, verify_coverage
from fourfold.verify.equal import verify_equal

SPEC = "tiny"
SETTINGS = ("run.steps=100", "run.validate_every=50")

NOT_SHOWN = (
    Finding(
        claim="every rank stays inside its memory",
        kind="open",
        expected="a predicted peak, held against the measured one",
        measured="not tested: activations are not predicted yet",
        verdict="open",
        would_test="a memory prediction that counts activations, and a measurement of every category",
    ),
    Finding(
        claim="after a failure the run continues as if nothing had happened",
        kind="open",
        expected="a resumed run equal bit for bit to an undisturbed one",
        measured="not tested by this demonstration",
        verdict="open",
        would_test="fourfold verify resume tiny --world 2",
    ),
    Finding(
        claim="the same holds on an accelerator",
        kind="open",
        expected="the same checks pass on CUDA devices",
        measured="not tested: this run used CPUs",
        verdict="open",
        would_test="fourfold train and verify on a machine with one",
    ),
)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """How it came out. exit_code: of the training; findings: of all checks."""

    exit_code: int
    run: RunDir
    findings: tuple[Finding, ...] = ()
    report: Path | None = None

    @property
    def passed(self) -> bool:
        """The training ended well and every check held."""
        return self.exit_code == 0 and verdict_of(self.findings) == "pass"


def plan_for(nproc: int) -> tuple[RunPlan, str]:
    """The plan of the demonstration on `nproc` ranks, and the TOML of its Spec.

    Raises SpecError where its batch cannot be cut over so many, naming the nearest numbers over which it can.
    """
    loaded = load_spec(SPEC, SETTINGS)
    try:
        plan = make_run_plan(loaded, nproc, ("fourfold", "lab", "demo", "--nproc", str(nproc)))
    except SpecError as error:
        batch = loaded.spec.batch
        assert batch.global_batch and batch.micro_batch, "the ready Spec gives both"
        near = nearest_divisors(batch.global_batch // batch.micro_batch, max(nproc, 1))
        instead = " or ".join(f"--nproc {number}" for number in near)
        raise SpecError([replace(problem, instead=instead) for problem in error.problems]) from error
    require(plan.spec, "train", loaded.provenance)
    return plan, loaded.text


def demonstrate(plan: RunPlan, run: RunDir, sets: Sequence[str], say: Callable[[str], None]) -> Demonstration:
    """Train as planned, audit the run's own ledger and two whole epochs, hold the layout against one device, report.

    run: claimed, with the request in it; findings and report go there. say: takes each line of the story.
    Raises DataError, SpecError as the verbs do.
    """
    say(
        f"1/4  train {plan.spec.name} on {counted(plan.world, 'rank')}: {plan.steps} steps of real text, then "
        "validation"
    )
    outcome = start(plan, run, new=True)
    if outcome.exit_code != 0:
        return Demonstration(outcome.exit_code, run)
    options = "".join(f" --set {setting}" for setting in sets)
    say("2/4  coverage: what this run read, and two whole epochs, sample by sample")
    documents = [
        run_coverage(run.path, command=f"fourfold verify coverage {run.path}"),
        verify_coverage(
            plan.spec,
            plan.world,
            out=run.path,
            command=f"fourfold verify coverage {SPEC} --world {plan.world}{options}",
        ),
    ]
    say(f"3/4  equality: {counted(plan.world, 'rank')} against one device, in fp64")
    documents.append(
        verify_equal(
            plan.spec,
            plan.world,
            out=run.path,
            command=f"fourfold verify equal {SPEC} --world {plan.world}{options}",
            say=lambda line: say(f"     {line}"),
        )
    )
    say("4/4  report")
    measured = tuple(
        Finding.model_validate(entry) for document in documents for entry in document["findings"]
    )
    concluded = (_conclusion(documents), *NOT_SHOWN)
    write_findings(run, "conclusions", concluded)
    return Demonstration(0, run, (*measured, *concluded), build_report(run.path))


def _conclusion(documents: Sequence[dict[str, Any]]) -> Finding:
    """What follows from the facts about the run that was just made."""
    passed = all(document["verdict"] == "pass" for document in documents)
    return Finding(
        claim="this run's loss curve is the one a single device would have drawn, up to rounding",
        kind="inference",
        expected="the same samples in the same global batches, and the same step on them",
        measured="follows: coverage and equality hold" if passed else "does not follow: a check failed",
        verdict="pass" if passed else "fail",
        basis=tuple(f"the {len(each['findings'])} findings of {each['findings_file']}" for each in documents),
    )
