"""`fourfold train`: a Spec becomes a plan, the plan a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from shlex import join, quote
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from fourfold.cli.output import next_command, print_document, story
from fourfold.record.aloud import folded
from fourfold.spec.errors import EXIT_DONE, EXIT_KILLED_BASE, EXIT_STOPPED, Problem, SpecError
from fourfold.spec.words import counted

if TYPE_CHECKING:
    from fourfold.launch.failure import FailureReport
    from fourfold.launch.rank import Rank
    from fourfold.launch.stop import StopRequest
    from fourfold.plan.run_plan import RunPlan
    from fourfold.record.run_dir import RunDir
    from fourfold.train.resume import GoingOn


def train(
    spec: str,
    /,
    *,
    nproc: int = 1,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", consume_multiple=False)] = (),
    resume: Literal["auto", "must", "never"] = "never",
    max_restarts: int = 0,
    smoke: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Train on local ranks, or, under torchrun, as one of its ranks.

    Examples:

        fourfold train tiny --nproc 2
        fourfold train my.toml --nproc 4 --set run.steps=500 --smoke
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
        Go on from the newest valid checkpoint of run.dir: auto (or begin, where nothing was saved there yet), must
        (or fail), never.
    max_restarts
        Start all ranks again, from the newest valid checkpoint, when one was killed, hung, lost the others or raised an
        error of its own; at most so often in a row without a newer checkpoint. Final are a good end, a stop signal and
        exit codes 2 to 5 (a wrong request, a check that failed, unreadable data; not a loader worker that was killed).
        Under torchrun give its own --max-restarts, and --resume auto.
    smoke
        Try the Spec first: three steps in a run directory of its own, a save, a resume held bit for bit against the
        undisturbed step, and the ledger of its samples. Exit 3 if one does not hold.
    dry_run
        Print the plan and stop; no rank is started, nothing is written. One step of rank 0 is rehearsed without
        values, for any number of ranks: what it holds, and which collectives it asks for.
    json
        Print one JSON document on stdout.
    """
    from fourfold.launch.rank import Rank
    from fourfold.launch.stop import StopRequest
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.spec.load import load_spec
    from fourfold.spec.rules import require
    from fourfold.spec.show import changed
    from fourfold.train.resume import chosen, resumed
    from fourfold.train.start import begin

    rank = Rank.from_environment()
    if smoke:
        from fourfold.cli.smoke import smoke_run

        more = {"dry_run": dry_run, "json": json}
        return smoke_run(spec, nproc, set_, resume=resume, max_restarts=max_restarts, rank=rank, **more)
    _check_restarts(max_restarts, rank)
    world, local = (nproc, nproc) if rank is None else (rank.world, rank.local_world)
    loaded = load_spec(spec, set_, world)
    plan = make_run_plan(loaded, world, ("fourfold", *sys.argv[1:]), local)
    require(plan.spec, "train", loaded.provenance)
    if max_restarts and not (plan.spec.checkpoint.every or plan.spec.checkpoint.every_s):
        note = "nothing is saved before a failure (checkpoint.every = 0): a restart begins anew, from the first step"
        plan = plan.model_copy(update={"notes": (*plan.notes, note)})
    if rank is None or rank.rank == 0:
        story(folded(changed(loaded.spec, plan.spec, loaded.provenance, world)))
    if dry_run and rank is not None and rank.rank > 0:
        return 0
    if dry_run:
        going_on = resumed(plan, resume)
        _say_from_where(going_on)
        plan = plan if going_on is None else going_on.plan
        if going_on is None or not going_on.finished:
            from fourfold.train.rehearsal import foreseen  # it imports torch

            story(f"rehearsing a step of one of {counted(plan.world, 'rank')}, without values")
            plan = foreseen(plan)
        if json:
            print_document(plan.model_dump(mode="json"))
        else:
            print(plan)
            if going_on is not None and going_on.finished:
                _next_of_finished(going_on.run)
            else:
                next_command(_command(spec, nproc, set_, resume, max_restarts))
        return 0
    if rank is not None:
        with StopRequest() as stop:  # from before torch is imported, which takes a while
            from fourfold.train.rank import run_under_torchrun

            run_under_torchrun(plan, rank, resume, loaded.text, stop)
    with ExitStack() as held:
        going_on = chosen(plan, resume, held)
        if going_on is not None and going_on.finished:
            return _nothing_to_do(going_on, json)
        with StopRequest() as stop:  # a run that has begun stops in good order: after a checkpoint
            run = begin(plan, loaded.text, going_on, held)
            plan = plan if going_on is None else going_on.plan
            code = _run_here(plan, run, json, stop, max_restarts, new=going_on is None)
    if code == EXIT_DONE:
        _next_of_finished(run)
    elif code == EXIT_STOPPED or code >= EXIT_KILLED_BASE:
        here = () if plan.spec.run.dir else (f"run.dir={run.path}",)
        next_command(_command(spec, nproc, (*set_, *here), "auto", max_restarts))
    return code


def _command(spec: str, nproc: int, sets: Sequence[str], resume: str, max_restarts: int) -> str:
    words = ["fourfold", "train", spec, "--nproc", str(nproc)]
    words += [word for setting in sets for word in ("--set", setting)]
    words += ["--resume", resume] if resume != "never" else []
    words += ["--max-restarts", str(max_restarts)] if max_restarts else []
    return join(words)


def _say_from_where(going_on: GoingOn | None) -> None:
    for text in () if going_on is None else going_on.story:
        story(folded(text))


def _nothing_to_do(going_on: GoingOn, json: bool) -> int:
    _say_from_where(going_on)
    if json:
        _print_ending(going_on.run, EXIT_DONE)
    _next_of_finished(going_on.run)
    return EXIT_DONE


def _next_of_finished(run: RunDir) -> None:
    place = quote(str(run.path))
    next_command(f"fourfold verify coverage {place}", f"fourfold report {place}")


def _print_ending(run: RunDir, code: int, restarts: int = 0, failures: Sequence[FailureReport] = ()) -> None:
    print_document(
        {
            "schema": "fourfold.train/1",
            "run": str(run.path),
            "exit_code": code,
            "restarts": restarts,
            "failures": [failure.model_dump(mode="json") for failure in failures],
        }
    )


def _check_restarts(most: int, rank: Rank | None) -> None:
    if most < 0:
        why = "it is how many restarts in a row may come to nothing"
        raise SpecError(Problem(f"--max-restarts {most}", "a negative number", why, "--max-restarts 3"))
    if most and rank is not None:
        raise SpecError(
            Problem(
                asked=f"--max-restarts {most} under torchrun",
                found="a rank that torchrun has started, and would start again",
                why="whoever started the ranks starts them again; here that is not Fourfold",
                instead=f"torchrun --max-restarts {most} … -m fourfold train SPEC --resume auto --set run.dir=… "
                "(then each start goes on from the newest valid checkpoint)",
            )
        )


def _run_here(plan: RunPlan, run: RunDir, json: bool, stop: StopRequest, max_restarts: int, new: bool) -> int:
    from fourfold.train.start import start

    story(f"run directory {run.path}")
    outcome = start(plan, run, stop, max_restarts, new)
    stop.ignore()
    if json:
        _print_ending(run, outcome.exit_code, outcome.restarts, outcome.failures)
    return outcome.exit_code
