"""What a look at the invariants of a run costs: CPU time of one, as a share of a step, at its default interval.

    python benchmarks/invariants.py [--cost invariants] [--spec small] [--nproc 2] [--pairs 60]

Steps of one training are taken in turn, with a look and without, in an order that alternates; without once more as a
null control. CPU time is that of all ranks' processes together. A look's cost is told twice: from paired differences
of whole steps, and measured by itself around the update; divided by the interval and by a step without it. Judged is
the lower end of the 95 % bootstrap interval of the latter; it is to be at most 1 %. Exit code 3 if it is not.

What else is done around updates is measured in the same way: one more entry of COSTS.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from paired import WARM_UP_STEPS, fourfold_loop, in_turn, interval_of_median

LIMIT = 0.01
NAMES = ("without", "with", "without again")


class Cost(NamedTuple):
    """around: entered around an update, by the number of its step. every: of so many steps one has it, by default."""

    around: Callable[[int], AbstractContextManager[None]]
    every: int


def of_invariants(training: Any) -> Cost:
    """A look at the invariants of a run, due in every step."""
    from fourfold.spec.training import RunSpec
    from fourfold.train.invariants import Invariants

    invariants = Invariants(training)
    return Cost(lambda number: invariants.around(number, saves=True), RunSpec().check_every)


COSTS: dict[str, Callable[[Any], Cost]] = {"invariants": of_invariants}


class Measured(NamedTuple):
    """CPU seconds of all ranks by round: of whole steps, and of what is looked at by itself."""

    steps: list[dict[str, float]]
    looks: list[float]
    every: int


def measure(plan_json: str, run_path: str, pairs: int, cost_name: str) -> Measured:
    """In each rank: steps with the cost and without, in turn."""
    import torch
    import torch.distributed as dist

    from fourfold.plan.run_plan import RunPlan
    from fourfold.record.run_dir import RunDir
    from fourfold.train.recorder import Recorder
    from fourfold.train.setup import open_training
    from fourfold.verify.here import joined_here

    plan = RunPlan.model_validate_json(plan_json)
    rounds = pairs + WARM_UP_STEPS
    looks: list[float] = []
    with (
        open_training(plan.spec, joined_here()) as training,
        Recorder(training, plan, RunDir(Path(run_path))) as record,
    ):
        record.started(0)
        cost = COSTS[cost_name](training)
        on = False

        @contextmanager
        def around(number: int) -> Iterator[None]:
            if not on:
                yield
                return
            looked = cost.around(number)
            start = time.process_time()
            looked.__enter__()
            worked = time.process_time() - start
            yield
            start = time.process_time()
            looked.__exit__(None, None, None)
            looks.append(worked + time.process_time() - start)

        step = fourfold_loop(training, record, len(NAMES) * rounds, around)

        def with_(switch: bool) -> Callable[[int], None]:
            def one(index: int) -> None:
                nonlocal on
                on = switch
                step(index)

            return one

        cpu: list[dict[str, float]] = []
        in_turn({name: with_(name == "with") for name in NAMES}, rounds, cpu)
    together = torch.tensor(looks[WARM_UP_STEPS:], dtype=torch.float64)
    dist.all_reduce(together)
    return Measured(cpu, together.tolist(), cost.every)


def told(what: str, shares: Sequence[float]) -> float:
    """Print the median of shares with its interval; returns the lower end."""
    median, low, high = interval_of_median(shares)
    print(f"  {what}: {median:.3%} of a step, 95 % interval {low:.3%} to {high:.3%}")
    return low


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cost", choices=[*COSTS], default="invariants")
    parser.add_argument("--spec", default="small")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    words = parser.parse_args()

    from fourfold.launch.pool import RankPool
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.record.run_dir import claim
    from fourfold.spec.load import load_spec

    sets = [*words.sets, f"run.steps={len(NAMES) * (words.pairs + WARM_UP_STEPS)}"]
    plan = make_run_plan(load_spec(words.spec, sets), words.nproc, ("benchmark",))
    with tempfile.TemporaryDirectory() as folder, RankPool(words.nproc, timeout_s=3600) as pool:
        run = claim(Path(folder) / "run")
        found = pool.run(measure, plan.model_dump_json(), str(run.path), words.pairs, words.cost)[0]

    step = statistics.median(one["without"] for one in found.steps)
    print(
        f"{words.cost}, {words.spec}, {words.nproc} ranks, {len(found.steps)} rounds; CPU of all ranks: a step "
        f"{step:.3f} s, a look {statistics.median(found.looks) * 1e3:.1f} ms, in one step of {found.every}"
    )
    for name in NAMES[1:]:
        shares = [(one[name] / one["without"] - 1) / found.every for one in found.steps]
        told(f"paired steps, {name}", shares)
    lower = told("the look by itself", [look / step / found.every for look in found.looks])
    passed = lower <= LIMIT
    print(f"lower end {lower:.3%} <= {LIMIT:.0%}: {'pass' if passed else 'FAIL'}")
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
