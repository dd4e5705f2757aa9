"""The resume exercise: a run that goes on from a checkpoint, first rightly, then with each classic mistake.

A small decoder on real text, 2 ranks, 20 steps, saved at step 10. Steps 11-20 of the undisturbed run are held against
steps 11-20 of a run that goes on from step 10 in new processes. The right way is the product's own loop, save and
load; the mistakes are written out in `resume_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold.checkpoint.choose import newest_valid
from fourfold.checkpoint.publish import step_name
from fourfold.lab import resume_mistakes as mistakes
from fourfold.lab import resume_ranks
from fourfold.lab.resume_disk import bits_of, saved
from fourfold.lab.resume_exercise import EARLIER, SAVED, STEPS, WORLD, Lab, Shown, in_ranks
from fourfold.plan.run_plan import make_run_plan
from fourfold.record.finding import document, write_findings
from fourfold.record.run_dir import claim
from fourfold.record.writer import write_json, write_request
from fourfold.spec.errors import RankFailed
from fourfold.spec.load import load_spec
from fourfold.verify.out import open_folder, open_room

SCHEMA = "fourfold.lab.resume/1"
SETTINGS = (
    'note="the resume exercise: a small decoder on the standard library\'s text"',
    'model={kind="import", target="fourfold.lab.resume_model:decoder"}',
    "data.sequence=64",
    "data.validation_fraction=0.0",
    "batch.global_batch=8",
    "batch.micro_batch=2",
    "optimizer.warmup_steps=15",  # the learning rate moves before and after
    f"run.steps={STEPS}",
    "run.validate_every=0",
    f"checkpoint.every={EARLIER}",
    f"checkpoint.keep_last={STEPS}",
)


def lab_resume(
    *,
    out: Path | None = None,
    setup: str | None = None,
    command: str = "fourfold lab resume",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run every exercise on two real ranks, in new processes each.

    out: folder for the findings (default: the next free runs/verify-lab-<n>); the runs stay in lab-resume-<n> in it.
    setup: "module:function" called in every rank first. say: takes each line of the story. Returns the document
    fourfold.lab.resume/1: "pass" if the right way is the same run to the last bit, and every mistake makes another run
    and is caught.
    """
    with open_folder(out, "lab") as results, open_room(results, "lab-resume") as folder:
        lab = _begun(folder, setup, command, say)
        shown: list[Shown] = []
        for exercise in EXERCISES:
            shown.append(exercise(lab))
            say(f"{len(shown)}/{len(EXERCISES)}  {shown[-1].title}")
    findings = [finding for each in shown for finding in each.findings]
    facts: dict[str, Any] = {
        "world": WORLD,
        "steps": STEPS,
        "saved": SAVED,
        "runs": str(folder),
        "exercises": [each.entry() for each in shown],
    }
    path = write_findings(results, "lab-resume", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, findings_file=str(path))


def _begun(folder: Path, setup: str | None, command: str, say: Callable[[str], None]) -> Lab:
    """The undisturbed run, from its first step to its last."""
    loaded = load_spec("tiny", SETTINGS)
    plan = make_run_plan(loaded, WORLD, tuple(command.split()))
    run = claim(folder / "undisturbed")
    write_request(run, plan.spec, plan.provenance, loaded.text)
    write_json(run.plan_json, plan)
    say(f"the undisturbed run: {STEPS} steps on {WORLD} ranks")
    return Lab(plan, folder, run, in_ranks(setup, resume_ranks.right, plan, run.path), setup, command)


def right_way(lab: Lab) -> Shown:
    """Everything is saved and put back."""
    shown = Shown(
        "right",
        "the right way: the whole state is saved and put back",
        "Parameters, moments, AdamW's step counter, every rank's random streams, the position in the data: with all of "
        "them no step can tell that the run was interrupted.",
    )
    run = lab.interrupted(shown.name, SAVED)
    try:
        shown.rows = lab.go_on(run, newest_valid(run.checkpoints))
    except RankFailed as failure:
        lab.fact(shown, "the run goes on", "no error", failure.problems[0].found, False)
        return shown
    differing, steps = sum(not row.same for row in shown.rows), STEPS - SAVED
    lab.fact(
        shown,
        "losses, gradient norms, learning rates and samples are those of the undisturbed run, to the last bit",
        f"0 of {steps} steps differ",
        f"{differing} of {len(shown.rows)} steps differ",
        differing == 0 and len(shown.rows) == steps,
    )
    one, other = (bits_of(saved(each, STEPS)) for each in (lab.undisturbed, run))
    same = sum(one[name] == other.get(name) for name in one)
    shown.fourfold.append(
        f"goes on from {step_name(SAVED)}; after step {STEPS} {same} of {len(one)} tensors are the same, bit for bit"
    )
    lab.fact(
        shown,
        f"so is the whole state after step {STEPS}: parameters, moments, AdamW's steps, random streams",
        f"{len(one)} of {len(one)} tensors are the same, bit for bit",
        f"{same} of {len(one)}",
        one == other,
    )
    return shown


EXERCISES = (
    right_way,
    mistakes.weights_only,
    mistakes.position_lost,
    mistakes.seed_reset,
    mistakes.one_file,
    mistakes.mark_first,
    mistakes.damaged_shard,
)
