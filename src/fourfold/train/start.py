"""From a plan to a run: claim its directory, write down what was asked, start the ranks. Imports no torch itself."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.checkpoint.validate import read_manifest
from fourfold.data.source import require_paths
from fourfold.plan.run_plan import RunPlan
from fourfold.record.aloud import folded, say, say_and_keep
from fourfold.record.environment import environment
from fourfold.record.lock import locked
from fourfold.record.run_dir import RunDir, claim_filled, claim_next, give_back
from fourfold.record.writer import write_json, write_request
from fourfold.spec.training import EXACT_THREADS
from fourfold.train.resume import GoingOn, next_point, reopen_run

if TYPE_CHECKING:
    from fourfold.launch.stop import StopRequest
    from fourfold.launch.watch import Outcome

RUNS = Path("runs")


def open_run(plan: RunPlan, text: str, resumes: bool = False) -> RunDir:
    """Claim `run.dir`, or the next free runs/<name>-<n>, with the request, the plan and the environment in it.

    text: the TOML that was asked with, kept verbatim. resumes: whether the verb could go on with a run instead.

    Raises SpecError for a name in use, DataError if it cannot be written, or if there is no data at the Spec's path:
    a run that cannot begin takes no name.
    """
    require_paths(plan.spec.data)

    def fill(run: RunDir) -> None:
        write_json(run.env_json, environment())
        write_json(run.plan_json, plan)
        write_request(run, plan.spec, plan.provenance, text)

    wanted = plan.spec.run.dir
    if wanted is None:
        return claim_next(RUNS, plan.spec.name, fill)
    return claim_filled(wanted, fill, resumes)


def begin(plan: RunPlan, text: str, going_on: GoingOn | None, held: ExitStack) -> RunDir:
    """Open the run directory, or open it again as `chosen`, saying from where it goes on; `held` keeps its lock.

    Raises what `open_run`, `reopen_run` and `locked` raise.
    """
    if going_on is None:
        run = open_run(plan, text, resumes=True)
        held.enter_context(locked(run))
        return run
    for text in going_on.story:
        say_and_keep(text, going_on.run.log)
    reopen_run(going_on.plan, going_on.run, going_on.choice)
    return going_on.run


def start(
    plan: RunPlan, run: RunDir, stop: StopRequest | None = None, max_restarts: int = 0, new: bool = False
) -> Outcome:
    """Run the plan's ranks on this machine to their end; how they ended, failures told on stderr.

    stop: a wish to stop that may have come already; it is the ranks' own then. max_restarts: how many times in a row
    ranks that failed are started again without a newer checkpoint than before. new: `run` was opened for this start.
    What its ranks then refuse of the request before their first step is raised, SpecError or DataError, and the run
    directory given back: a run that cannot begin takes no name.
    """
    from fourfold.launch.agent import Launch, launch
    from fourfold.launch.restarts import Restarts

    done = read_manifest(Path(plan.resume_from)).step if plan.resume_from else 0
    asked = Launch(
        command=(sys.executable, "-m", "fourfold.train.rank", str(run.path)),
        nproc=plan.nproc,
        run_dir=run.path,
        timeout_s=plan.spec.run.timeout_s,
        grace_s=plan.spec.run.grace_s,
        threads_per_rank=plan.spec.hardware.threads_per_rank
        or (EXACT_THREADS if plan.spec.run.exact else None),
        typed=plan.command,
        holds=True,
        restarts=Restarts(max_restarts, partial(next_point, plan, run), done) if max_restarts else None,
        may_refuse=new,
    )
    outcome = launch(
        asked, stop
    )  # whatever this raises keeps the directory: an earlier attempt may have trained
    if new and (refusal := outcome.refusal()) is not None:
        give_back(run)
        say(folded(f"nothing was begun: the name {run.path} is free again"))
        raise refusal
    return outcome
