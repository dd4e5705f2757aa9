"""A ZeRO-3 step of Fourfold against a hand-written PyTorch FSDP2 loop of the same model and data.

    python benchmarks/zero3_step.py [--spec small] [--nproc 2] [--pairs 80] [--exact]

Three loops live side by side in the same ranks: Fourfold's (loader, totals, accumulation, clipping, check for
non-finite values, update, events and metrics), the plain one, and the plain one again as a null control. They
step in turn, in an order that alternates, between barriers. Judged is the lower end of the 95 % bootstrap
interval of the median of the paired ratios; it is to be at most 1.02, in exact mode (--exact) 1.0. Exit code 3 if it
is not, or if the loops do not train alike: their losses are held against each other after the last step.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paired import LIMIT, WARM_UP_STEPS, asked, fourfold_loop, in_turn, judged, told

EXACT_LIMIT = 1.0

SAME = 1e-4  # relative, of two losses in fp32 whose sums were taken in another order for so many steps


class Plain:
    """What an engineer writes by hand: each block and the root under FSDP2, clip, AdamW over DTensors.

    Gradients are reduced after each microbatch, which is FSDP2's default and what ZeRO-3 holds between them.
    """

    def __init__(self, spec: Any, batches_of_step: list[list[Any]]) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from fourfold.models.protocol import LossModule
        from fourfold.models.registry import kit_for

        kit = kit_for(spec)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = LossModule(kit, kit.build(spec.run.seed, torch.float32))
        for name in kit.blocks(self.model.module):
            fully_shard(self.model.module.get_submodule(name), mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        asked = spec.optimizer
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": asked.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=asked.lr,
            betas=asked.betas,
            eps=asked.eps,
            fused=True,
        )
        self.clip_norm = spec.optimizer.clip_norm
        self.world = dist.get_world_size()
        self.batches_of_step = batches_of_step

    def __call__(self, index: int) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn

        batches = self.batches_of_step[index % len(self.batches_of_step)]
        count = torch.tensor(sum(int(batch.valid.sum()) for batch in batches))
        dist.all_reduce(count)
        for batch in batches:
            loss, _ = self.model(batch)
            (loss * self.world / count).backward()  # FSDP2 averages
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure(plan_json: str, run_path: str, pairs: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    """In each rank: seconds of one step of each loop, per round, of the slowest rank; and each loop's last loss."""
    import torch
    import torch.distributed as dist

    from fourfold.plan.run_plan import RunPlan
    from fourfold.record.run_dir import RunDir
    from fourfold.train.recorder import Recorder
    from fourfold.train.setup import open_training
    from fourfold.verify.here import joined_here

    plan = RunPlan.model_validate_json(plan_json)
    rounds = pairs + WARM_UP_STEPS
    with (
        open_training(plan.spec, joined_here()) as training,
        Recorder(training, plan, RunDir(Path(run_path))) as record,
    ):
        record.started(0)
        held = list(training.loader.steps(0, rounds))
        loops: dict[str, Callable[[int], None]] = {
            "fourfold": fourfold_loop(training, record, rounds),
            "plain": Plain(training.spec, held),
            "plain again": Plain(training.spec, held),
        }
        times = in_turn(loops, rounds)
        losses = {}
        for name, module in (("fourfold", training.parallel.module), ("plain", loops["plain"].model)):  # type: ignore[attr-defined]
            module.eval()
            with torch.no_grad():
                total = module(held[0][0])[0].double()
            dist.all_reduce(total)
            losses[name] = float(total)
    return times, losses


def main() -> int:
    words = asked(__doc__)

    from fourfold.launch.pool import RankPool
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.record.run_dir import claim
    from fourfold.spec.load import load_spec

    sets = [
        f"run.steps={words.pairs + WARM_UP_STEPS}",
        "layout.zero=3",
        f"run.exact={str(words.exact).lower()}",
        # a constant rate, as the plain loop has it, and no dropout: both see the same samples
        *('optimizer.schedule="constant"', "optimizer.warmup_steps=0", "model.dropout=0.0"),
    ]
    plan = make_run_plan(load_spec(words.spec, sets), words.nproc, ("benchmark",))
    with tempfile.TemporaryDirectory() as folder, RankPool(words.nproc, timeout_s=3600) as pool:
        run = claim(Path(folder) / "run")
        times, losses = pool.run(measure, plan.model_dump_json(), str(run.path), words.pairs)[0]

    lower_end = told(f"{words.spec}, zero 3 on {words.nproc} ranks", times)
    apart = abs(losses["fourfold"] / losses["plain"] - 1)
    print(f"  losses after the last step: {apart:.1e} apart")
    return judged(lower_end, alike=apart <= SAME, limit=EXACT_LIMIT if words.exact else LIMIT)


if __name__ == "__main__":
    sys.exit(main())
