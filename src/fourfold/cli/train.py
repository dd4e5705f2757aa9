"""`fourfold train`: a Spec becomes a plan, the plan a run."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from fourfold.cli.output import next_command, print_document, story
from fourfold.spec.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from fourfold.plan.run_plan import RunPlan
    from fourfold.record.run_dir import RunDir


def train(
    spec: str,
    /,
    *,
    nproc: int = 1,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", consume_multiple=False)] = (),
    resume: Literal["auto", "must", "never"] = "never",
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Train on local ranks, or, under torchrun, as one of its ranks.

    Examples:

        fourfold train tiny --nproc 2
        fourfold train my.toml --nproc 4 --set run.steps=500 --dry-run
        torchrun --nproc-per-node 2 -m fourfold train tiny

    Parameters
    ----------
    spec
        A TOML file, or the name of a ready Spec (`fourfold spec list`).
    nproc
        Ranks to start on this machine; under torchrun its own number counts.
    set_
        One setting, `a.b=value`; may be repeated, and wins over the file.
    resume
        Go on from the newest valid checkpoint of run.dir: auto (or begin, where there is no such directory), must
        (or fail), never.
    dry_run
        Print the plan and stop; nothing is started or written.
    json
        Print one JSON document on stdout.
    """
    from fourfold.launch.rank import Rank
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.record.lock import locked
    from fourfold.spec.load import load_spec
    from fourfold.spec.rules import require
    from fourfold.train.resume import reopen_run, resumed
    from fourfold.train.start import open_run

    loaded = load_spec(spec, set_)
    rank = Rank.from_environment()
    world, local = (nproc, nproc) if rank is None else (rank.world, rank.local_world)
    plan = make_run_plan(loaded, world, ("fourfold", *sys.argv[1:]), local)
    require(plan.spec, "train", loaded.provenance)
    going_on = resumed(plan, resume)
    if going_on is not None:
        plan, run = going_on.plan, going_on.run
        for path, reason in going_on.choice.passed_over:
            story(f"passed over {path}: {reason}")
        story(f"goes on from {going_on.choice.path}")
    if dry_run:
        if json:
            print_document(plan.model_dump(mode="json"))
        else:
            print(plan)
            next_command(f"fourfold train {spec} --nproc {nproc}")
        return 0
    if rank is not None:
        from fourfold.train.rank import run_under_torchrun

        run_under_torchrun(plan, rank, going_on, loaded.text)
    if going_on is None:
        run = open_run(plan, loaded.text)
    with locked(run):
        if going_on is not None:
            reopen_run(plan, run, going_on.choice)
        return _run_here(plan, run, json)


def _run_here(plan: RunPlan, run: RunDir, json: bool) -> int:
    from fourfold.train.start import start

    story(f"run directory {run.path}")
    outcome = start(plan, run)
    if outcome.exit_code == EXIT_STOPPED:
        # Stopped as asked: the same wish, told again, must not turn this into death by a signal.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    if json:
        print_document(
            {
                "schema": "fourfold.train/1",
                "run": str(run.path),
                "exit_code": outcome.exit_code,
                "failures": [failure.model_dump(mode="json") for failure in outcome.failures],
            }
        )
    if outcome.exit_code == 0:
        next_command(f"fourfold verify coverage {run.path}", f"fourfold report {run.path}")
    return outcome.exit_code
