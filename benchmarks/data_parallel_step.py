"""A data-parallel step of Fourfold against a hand-written PyTorch DDP loop of the same model and data.

    python benchmarks/data_parallel_step.py [--spec small] [--nproc 2] [--pairs 80] [--exact]

Three loops live side by side in the same ranks: Fourfold's (loader, totals, accumulation, clipping, check for
non-finite values, update, events and metrics), the plain one, and the plain one again as a null control. They
step in turn, in an order that alternates, between barriers. Judged is the lower end of the 95 % bootstrap
interval of the median of the paired ratios; it is to be at most 1.02, in exact mode (--exact) 1.10. Exit code 3 if it
is not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paired import LIMIT, WARM_UP_STEPS, asked, fourfold_loop, in_turn, judged, told

EXACT_LIMIT = 1.10


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


def measure(plan_json: str, run_path: str, pairs: int) -> list[dict[str, float]]:
    """In each rank: seconds of one step of each loop, per round; a round's time is that of the slowest rank."""

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
        return in_turn(loops, rounds)


def main() -> int:
    words = asked(__doc__)

    from fourfold.launch.pool import RankPool
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.record.run_dir import claim
    from fourfold.spec.load import load_spec

    sets = [f"run.steps={words.pairs + WARM_UP_STEPS}", f"run.exact={str(words.exact).lower()}"]
    plan = make_run_plan(load_spec(words.spec, sets), words.nproc, ("benchmark",))
    with tempfile.TemporaryDirectory() as folder, RankPool(words.nproc, timeout_s=3600) as pool:
        run = claim(Path(folder) / "run")
        times = pool.run(measure, plan.model_dump_json(), str(run.path), words.pairs)[0]

    limit = EXACT_LIMIT if words.exact else LIMIT
    return judged(told(f"{words.spec} on {words.nproc} ranks", times), limit=limit)


if __name__ == "__main__":
    sys.exit(main())
