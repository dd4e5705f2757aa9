"""`fourfold train`: a Spec becomes a plan, the plan a run."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fourfold.cli.output import next_command, print_document, story
from fourfold.spec.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from fourfold.plan.run_plan import RunPlan


def train(
    spec: str,
    /,
    *,
    nproc: int = 1,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", consume_multiple=False)] = (),
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
    dry_run
        Print the plan and stop; nothing is started or written.
    json
        Print one JSON document on stdout.
    """
    from fourfold.launch.rank import Rank
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.spec.load import load_spec
    from fourfold.spec.rules import require

    loaded = load_spec(spec, set_)
    rank = Rank.from_environment()
    world, local = (nproc, nproc) if rank is None else (rank.world, rank.local_world)
    plan = make_run_plan(loaded, world, ("fourfold", *sys.argv[1:]), local)
    require(plan.spec, "train", loaded.provenance)
    if dry_run:
        if json:
            print_document(plan.model_dump(mode="json"))
        else:
            print(plan)
            next_command(f"fourfold train {spec} --nproc {nproc}")
        return 0
    if rank is not None:
        from fourfold.train.rank import run_rank

        run_rank(plan, rank, None, loaded.text)
    return _run_here(plan, loaded.text, json)


def _run_here(plan: RunPlan, text: str, json: bool) -> int:
    from fourfold.train.start import open_run, start

    run = open_run(plan, text)
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
