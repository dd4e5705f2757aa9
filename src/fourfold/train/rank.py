"""What one rank process does: join the others, train as planned, end with the right exit code.

    python -m fourfold.train.rank RUN_DIR     (started by `fourfold train`; the plan lies in RUN_DIR)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fourfold.launch.guard import guard
from fourfold.launch.pulse import Pulse
from fourfold.launch.rank import Joined, Rank, join
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import EXIT_DONE, EXIT_STOPPED, FourfoldError, Problem, SpecError
from fourfold.train.loop import train
from fourfold.train.start import open_run

LONG_PHASE = "opening data and model"


def run_rank(plan: RunPlan, rank: Rank, run: RunDir | None, text: str = "") -> int:
    """Train on this rank; returns 0, or 75 after an agreed stop. A failure ends the process (see `guard`).

    run: the claimed run directory, or None for rank 0 to claim one and tell the others (under torchrun)
    and to keep `text`, the TOML asked with, in it.
    Collectives: those of `train.loop.train`; the name of the run directory goes through the store.
    """
    run_spec = plan.spec.run
    with StopRequest() as stop, join(rank, plan.spec.hardware.device, run_spec.timeout_s) as joined:
        if run is None:
            run = _agree_on_run(plan, text, joined)
        pulse = Pulse(run.path / "pulse", rank.rank)
        with guard(rank, joined.store, run.path, pulse):
            pulse.beat(0, LONG_PHASE, patient=True)
            ending = train(plan, joined, run, stop, pulse.beat)
        pulse.close()
    return EXIT_DONE if ending == "finished" else EXIT_STOPPED


def _agree_on_run(plan: RunPlan, text: str, joined: Joined) -> RunDir:
    """Rank 0 claims the run directory; the others learn its name, or that it cannot be had."""
    key = "run directory"
    if joined.rank.rank == 0:
        try:
            run = open_run(plan, text)
        except FourfoldError as error:
            joined.store.set(key, json.dumps({"error": str(error)}))
            raise
        joined.store.set(key, json.dumps({"path": str(run.path.absolute())}))
        print(f"run directory {run.path}", file=sys.stderr, flush=True)
        return run
    told = json.loads(joined.store.get(key))
    if "error" in told:
        raise SpecError(
            Problem("the run directory that rank 0 claims", told["error"], "rank 0 could not have it", "")
        )
    return RunDir(Path(told["path"]))


def main() -> int:
    """Entry of a rank that `fourfold train` started."""
    run = RunDir(Path(sys.argv[1]))
    plan = RunPlan.model_validate_json(run.plan_json.read_text(encoding="utf-8"))
    rank = Rank.from_environment()
    assert rank is not None, "only the agent starts this module"
    return run_rank(plan, rank, run)


if __name__ == "__main__":
    sys.exit(main())
