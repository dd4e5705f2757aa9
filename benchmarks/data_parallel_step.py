"""A data-parallel step of Fourfold against a hand-written PyTorch DDP loop of the same model and data.

    python benchmarks/data_parallel_step.py [--spec small] [--nproc 2] [--pairs 80]

Three loops live side by side in the same ranks: Fourfold's (loader, totals, accumulation, clipping, check for
non-finite values, update, events and metrics), the plain one, and the plain one again as a null control. They
step in turn, in an order that alternates, between barriers. Judged is the lower end of the 95 % bootstrap
interval of the median of the paired ratios; it is to be at most 1.02. Exit code 3 if it is not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIMIT = 1.02
WARM_UP_STEPS = 6


def interval_of_median(values: Sequence[float], draws: int = 4000) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return statistics.median(values), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def plain_loop(spec: Any, batches_of_step: list[list[Any]]) -> Callable[[int], None]:
    """What an engineer writes by hand: DDP, no_sync but for the last microbatch, clip, AdamW."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from fourfold.models.protocol import LossModule
    from fourfold.models.registry import kit_for

    kit = kit_for(spec)
    model = DistributedDataParallel(
        LossModule(kit, kit.build(spec.run.seed, torch.float32)), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.optimizer.lr, betas=spec.optimizer.betas, fused=True
    )
    world = dist.get_world_size()

    def step(index: int) -> None:
        batches = batches_of_step[index % len(batches_of_step)]
        count = torch.tensor(sum(int(batch.valid.sum()) for batch in batches))
        dist.all_reduce(count)
        for batch in batches[:-1]:
            with model.no_sync():
                loss, _ = model(batch)
                (loss * world / count).backward()
        loss, _ = model(batches[-1])
        (loss * world / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def fourfold_loop(training: Any, record: Any, steps: int) -> Callable[[int], None]:
    """The product's loop body, call for call as in train/loop.py."""
    from fourfold.train.checks import check_step
    from fourfold.train.step import accumulate, agree_totals, clip, update

    supply = enumerate(training.loader.steps(0, steps))

    def step(_index: int) -> None:
        number, batches = next(supply)
        pending = agree_totals(training, batches, stop_requested=False)
        pair, totals = accumulate(training, batches, pending)
        norm = clip(training)
        check_step(training, batches, pair, norm)
        rate = update(training, number)
        record.step(number, batches, pair, norm, rate, totals)

    return step


def measure(plan_json: str, run_path: str, pairs: int) -> list[dict[str, float]]:
    """In each rank: seconds of one step of each loop, per round; a round's time is that of the slowest rank."""
    import torch
    import torch.distributed as dist

    from fourfold.plan.run_plan import RunPlan
    from fourfold.record.run_dir import RunDir
    from fourfold.train.recorder import Recorder
    from fourfold.train.setup import open_training
    from fourfold.verify.here import joined_here

    plan = RunPlan.model_validate_json(plan_json)
    joined = joined_here()
    rounds = pairs + WARM_UP_STEPS
    with (
        open_training(plan.spec, joined) as training,
        Recorder(training, plan, RunDir(Path(run_path))) as record,
    ):
        record.started(0)
        held = list(training.loader.steps(0, 8))
        loops = {
            "fourfold": fourfold_loop(training, record, rounds),
            "plain": plain_loop(plan.spec, held),
            "plain again": plain_loop(plan.spec, held),
        }
        times: list[dict[str, float]] = []
        for index in range(rounds):
            order = list(loops)
            order = order[index % 3 :] + order[: index % 3]
            if index % 2:
                order.reverse()
            seconds = dict.fromkeys(loops, 0.0)
            for name in order:
                dist.barrier()
                start = time.perf_counter()
                loops[name](index)
                seconds[name] = time.perf_counter() - start
            slowest = torch.tensor([seconds[name] for name in loops], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times.append(dict(zip(loops, slowest.tolist(), strict=True)))
    return times[WARM_UP_STEPS:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", default="small")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=80)
    asked = parser.parse_args()

    from fourfold.launch.pool import RankPool
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.record.run_dir import claim
    from fourfold.spec.load import load_spec

    steps = f"run.steps={asked.pairs + WARM_UP_STEPS}"
    plan = make_run_plan(load_spec(asked.spec, [steps]), asked.nproc, ("benchmark",))
    with tempfile.TemporaryDirectory() as folder, RankPool(asked.nproc, timeout_s=3600) as pool:
        run = claim(Path(folder) / "run")
        times = pool.run(measure, plan.model_dump_json(), str(run.path), asked.pairs)[0]

    print(f"{asked.spec} on {asked.nproc} ranks, {len(times)} rounds; seconds of a step, median")
    for name in times[0]:
        print(f"  {name:<12} {statistics.median(t[name] for t in times):.4f}")
    verdicts = {}
    for name, over in (("fourfold", "plain"), ("plain again", "plain")):
        median, low, high = interval_of_median([t[name] / t[over] for t in times])
        verdicts[name] = low
        print(f"  {name} / {over}: median {median:.4f}, 95 % interval {low:.4f} to {high:.4f}")
    passed = verdicts["fourfold"] <= LIMIT
    print(f"lower end {verdicts['fourfold']:.4f} <= {LIMIT}: {'pass' if passed else 'FAIL'}")
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
