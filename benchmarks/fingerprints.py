"""What noting collectives costs: CPU time of it in a step, as a share of the step's.

    python benchmarks/fingerprints.py [--spec small] [--nproc 2] [--steps 60] [--set layout.dp_shard=2 ...]

Measured by itself, for it is far below the noise of whole steps: every call's note on its own clock, each comparison
with the other ranks (one in `run.check_every` steps), what the watchdog reads twice a second, and how much longer a
collective takes with torch's flight recorder than without, times how often it is called. CPU time is that of all ranks
together. The upper end of the 95 % bootstrap interval is held against 1 %, of which the invariants have their part
(benchmarks/invariants.py). Exit code 3 if it is above.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from paired import WARM_UP_STEPS, fourfold_loop, interval_of_median

LIMIT = 0.01
LOOKS = 20  # of the watchdog, of which the mean is taken
_ALONE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(1)
def calls(count):
    start = time.process_time()
    for _ in range(count):
        dist.all_reduce(tensor)
    return (time.process_time() - start) / count
calls(2000)
print(min(calls(2000) for _ in range(5)))
"""


class Spent(NamedTuple):
    """CPU seconds of all ranks, by step: of the step, of notes, of one comparison; collectives of one rank a step."""

    step: float
    notes: float
    comparison: float
    calls: float


def measure(plan_json: str, folder: str, steps: int) -> tuple[list[Spent], float]:
    """In each rank: steps whose collectives are noted; and seconds of one reading of the counters."""
    import torch
    import torch.distributed as dist

    from fourfold.collectives.fingerprints import Fingerprints
    from fourfold.collectives.standing import counts
    from fourfold.plan.run_plan import RunPlan
    from fourfold.record.calls import CallsFile
    from fourfold.record.run_dir import RunDir
    from fourfold.train.recorder import Recorder
    from fourfold.train.setup import open_training
    from fourfold.verify.here import joined_here

    class Timed(Fingerprints):
        spent = 0.0

        def _note(self, *asked: Any) -> None:
            start = time.perf_counter()
            super()._note(*asked)
            self.spent += time.perf_counter() - start

    plan = RunPlan.model_validate_json(plan_json)
    calls = Timed(CallsFile(Path(folder) / "calls", dist.get_rank()))
    own: list[list[float]] = []
    with (
        open_training(plan.spec, joined_here()) as training,
        Recorder(training, plan, RunDir(Path(folder))) as record,
        calls.kept(),
    ):
        record.started(0)
        step = fourfold_loop(training, record, steps + WARM_UP_STEPS)
        for index in range(steps + WARM_UP_STEPS):
            entered, noted, worked, count = counts()[0], calls.spent, time.process_time(), calls.count
            step(index)
            worked = time.process_time() - worked
            noted, count = calls.spent - noted, calls.count - count
            count = max(count, sum(counts()[0].values()) - sum(entered.values()))  # DDP's own, too
            compared = time.process_time()
            calls.compare(index)
            own.append([worked, noted, time.process_time() - compared, count / dist.get_world_size()])
    together = torch.tensor(own[WARM_UP_STEPS:], dtype=torch.float64)
    dist.all_reduce(together)
    start = time.process_time()
    for _ in range(LOOKS):
        counts()
    return [Spent(*each) for each in together.tolist()], (time.process_time() - start) / LOOKS


def recorder_s() -> float:
    """Seconds that a collective takes more with torch's flight recorder, in processes of one rank."""

    def alone(size: int) -> float:
        env = {**os.environ, "TORCH_FR_BUFFER_SIZE": str(size)}
        done = subprocess.run(
            [sys.executable, "-c", _ALONE], env=env, capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    return statistics.median(alone(64) - alone(0) for _ in range(3))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", default="small")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    words = parser.parse_args()

    from fourfold.launch.pool import RankPool
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.record.run_dir import claim
    from fourfold.spec.load import load_spec

    sets = [*words.sets, f"run.steps={words.steps + WARM_UP_STEPS}"]
    plan = make_run_plan(load_spec(words.spec, sets), words.nproc, ("benchmark",))
    with tempfile.TemporaryDirectory() as folder, RankPool(words.nproc, timeout_s=3600) as pool:
        run = claim(Path(folder) / "run")
        steps, reading_s = pool.run(measure, plan.model_dump_json(), str(run.path), words.steps)[0]
    more_s = recorder_s()

    every, ranks = plan.spec.run.check_every, words.nproc
    shares = [
        (one.notes + one.comparison / every + one.calls * ranks * more_s) / one.step + 2 * reading_s
        for one in steps
    ]
    middle = Spent(*map(statistics.median, zip(*steps, strict=True)))
    print(
        f"{words.spec} {' '.join(words.sets)} on {ranks} ranks, {len(steps)} steps; CPU of all ranks: "
        f"a step {middle.step:.3f} s, "
        f"{middle.calls:.0f} collectives a rank, their notes {middle.notes * 1e3:.2f} ms, a comparison "
        f"{middle.comparison * 1e3:.2f} ms in one step of {every}, the flight recorder {more_s * 1e6:.1f} us a call, "
        f"the watchdog {reading_s * 1e6:.0f} us twice a second"
    )
    median, low, high = interval_of_median(shares)
    print(f"together {median:.3%} of a step, 95 % interval {low:.3%} to {high:.3%}; at most {LIMIT:.0%}")
    return 0 if high <= LIMIT else 3


if __name__ == "__main__":
    sys.exit(main())
