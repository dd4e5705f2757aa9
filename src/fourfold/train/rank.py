"""What one rank process does: join the others, train as planned, end with the right exit code.

python -m fourfold.train.rank RUN_DIR     (started by `fourfold train`; the plan lies in RUN_DIR)
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from fourfold.collectives.fingerprints import Fingerprints
from fourfold.collectives.watchdog import Place, Watchdog
from fourfold.launch.guard import end, guard, leave
from fourfold.launch.pulse import Pulse
from fourfold.launch.rank import Joined, Rank, join
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan
from fourfold.record.aloud import folded, say
from fourfold.record.calls import CALLS, CallsFile
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines
from fourfold.spec.errors import EXIT_DONE, EXIT_STOPPED, FourfoldError, Problem, SpecError
from fourfold.train.loop import train
from fourfold.train.resume import Resume, chosen
from fourfold.train.start import begin

LONG_PHASE = "opening data and model"


def run_rank(plan: RunPlan, rank: Rank, run: RunDir) -> NoReturn:
    """Train on this rank and end the process: with 0, with 75 after an agreed stop, or as `guard` says.

    run: claimed and locked by the launcher. Collectives: those of `train.loop.train`.
    """
    with StopRequest() as stop:  # to the very end: a signal must not kill what has ended in good order
        with (
            guard(rank, None, run.path, None),
            join(rank, plan.spec.hardware.device, plan.spec.run.timeout_s) as joined,
        ):
            code = _train_guarded(plan, joined, run, stop)
        leave(code)


def run_under_torchrun(plan: RunPlan, rank: Rank, resume: Resume, text: str, stop: StopRequest) -> NoReturn:
    """The same where no launcher of ours is: rank 0 claims the run directory, or goes on with it, under its lock.

    text: the TOML asked with, kept in a new run. The others learn from rank 0, through the store, where the run is and
    from which checkpoint it goes on. stop: entered.
    """
    with (
        ExitStack() as held,
        join(rank, plan.spec.hardware.device, plan.spec.run.timeout_s) as joined,
    ):
        agreed = _agree_on_run(plan, joined, resume, text, held)
        code = EXIT_DONE if agreed is None else _train_guarded(agreed[0], joined, agreed[1], stop)
    leave(code)


def _train_guarded(plan: RunPlan, joined: Joined, run: RunDir, stop: StopRequest) -> int:
    """From here on a failure can be told to the other ranks, through the store."""
    pulse = Pulse(run.path / "pulse", joined.rank.rank)
    rank, store = joined.rank, joined.store
    with guard(rank, store, run.path, pulse):
        pulse.beat(0, LONG_PHASE, patient=True)
        _note_attempt(rank, run)
        calls = Fingerprints(CallsFile(run.path / CALLS, rank.rank))
        watchdog = Watchdog(
            rank=rank.rank,
            world=rank.world,
            store=store,
            timeout_s=plan.spec.run.timeout_s,
            fingerprints=calls,
            at=lambda: Place(pulse.step, pulse.phase, pulse.beats),
            end=partial(end, rank, store, run.path, pulse),
        )
        try:
            with calls.kept(), watchdog.watching():
                ending = train(plan, joined, run, stop, pulse.beat, calls=calls)
        except SystemExit as leaving:  # never ours: with code 0 it would pass for a finished run
            raise FourfoldError(_left(leaving)) from leaving
    pulse.close()
    return EXIT_DONE if ending == "finished" else EXIT_STOPPED


def _note_attempt(rank: Rank, run: RunDir) -> None:
    """What follows in this rank's events is of this attempt."""
    with JsonLines(run.events(rank.rank)) as events:
        values = {"kind": "joined", "attempt": rank.attempt, "pid": os.getpid()}
        events.write({"t": time.time(), "rank": rank.rank, "step": 0, **values})


def _left(leaving: SystemExit) -> Problem:
    return Problem(
        asked="a run to its last step",
        found=f"SystemExit: {leaving.code}",
        why="the model or a transform called sys.exit(): a rank that leaves so ends every other one, too",
        instead="raise an error there",
    )


def _agree_on_run(
    plan: RunPlan, joined: Joined, resume: Resume, text: str, held: ExitStack
) -> tuple[RunPlan, RunDir] | None:
    """Rank 0 opens the run directory; the others learn its name and the checkpoint, or that it cannot be had.

    None for a run that is finished: there is nothing to do.
    """
    key = "run directory"
    if joined.rank.rank == 0:
        try:
            going_on = chosen(plan, resume, held)
            if going_on is not None and going_on.finished:
                say(folded(going_on.told))
                joined.store.set(key, json.dumps({"finished": True}))
                return None
            run = begin(plan, text, going_on, held)
        except FourfoldError as error:
            joined.store.set(key, json.dumps({"error": str(error)}))
            dist.destroy_process_group()  # every rank ends here, in the same way
            raise
        say(f"run directory {run.path}")
        if going_on is not None:
            plan = going_on.plan
        joined.store.set(key, json.dumps({"path": str(run.path.absolute()), "resume_from": plan.resume_from}))
        return plan, run
    told = json.loads(joined.store.get(key))
    if "finished" in told:
        return None
    if "error" in told:
        dist.destroy_process_group()
        raise SpecError(
            Problem("the run directory that rank 0 claims", told["error"], "rank 0 could not have it", "")
        )
    return plan.model_copy(update={"resume_from": told["resume_from"]}), RunDir(Path(told["path"]))


def main() -> NoReturn:
    """Entry of a rank that `fourfold train` started."""
    run = RunDir(Path(sys.argv[1]))
    plan = RunPlan.model_validate_json(run.plan_json.read_text(encoding="utf-8"))
    rank = Rank.from_environment()
    assert rank is not None, "only the agent starts this module"
    run_rank(plan, rank, run)


if __name__ == "__main__":
    main()
