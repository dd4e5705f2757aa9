"""A reduce-scatter as an all-to-all and sums in one order, against the backend's own.

    python benchmarks/reduce_scatter.py [--nproc 2] [--pairs 60] [--dtype float32]
    python benchmarks/reduce_scatter.py --spec small [--zero 3] [--nproc 2] [--pairs 60]

By itself: for each size (bytes of one rank's input) both run in turn in the same ranks, in an order that alternates,
between barriers, and the library's own once more as a null control. With --spec: whole steps of one training of
Fourfold, whose units of FSDP2 are given the one or the other in turn. Told are medians of paired ratios with their 95 %
bootstrap intervals. Nothing is judged: it says where sums in order are faster here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paired import WARM_UP_STEPS, fourfold_loop, in_turn, interval_of_median

SIZES = (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
WARM_UP = 5
NAMES = ("library", "in order", "library again")


def measure(pairs: int, dtype_name: str) -> dict[int, list[dict[str, float]]]:
    """In each rank: seconds of one call of each, by size and round; a round's time is that of the slowest rank."""
    import torch
    import torch.distributed as dist

    from fourfold.collectives.tree import reduce_scatter

    world, dtype = dist.get_world_size(), getattr(torch, dtype_name)

    def library(output: torch.Tensor, source: torch.Tensor) -> None:
        dist.reduce_scatter_single(output, source)

    def in_order(output: torch.Tensor, source: torch.Tensor) -> None:
        reduce_scatter(output, source, None)

    calls = dict(zip(NAMES, (library, in_order, library), strict=True))
    found: dict[int, list[dict[str, float]]] = {}
    for size in SIZES:
        source = torch.randn(size // dtype.itemsize // world * world).to(dtype)
        output = torch.empty(source.numel() // world, dtype=dtype)
        rounds: list[dict[str, float]] = []
        for index in range(pairs + WARM_UP):
            names = list(calls)[:: -1 if index % 2 else 1]
            seconds = dict.fromkeys(calls, 0.0)
            for name in names:
                dist.barrier()
                start = time.perf_counter()
                calls[name](output, source)
                seconds[name] = time.perf_counter() - start
            slowest = torch.tensor([seconds[name] for name in calls], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            rounds.append(dict(zip(calls, slowest.tolist(), strict=True)))
        found[size] = rounds[WARM_UP:]
    return found


def measure_steps(plan_json: str, run_path: str, pairs: int) -> tuple[list[dict[str, float]], ...]:
    """In each rank: seconds of one step with each, per round, of the slowest rank; and CPU seconds of all ranks."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    from fourfold.parallel.in_order import ReduceScatterInOrder
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
        step = fourfold_loop(training, record, len(NAMES) * rounds)
        units = [m for m in training.parallel.module.modules() if isinstance(m, FSDPModule)]

        def with_(comm: DefaultReduceScatter) -> Callable[[int], None]:
            def one(index: int) -> None:
                for unit in units:
                    unit.set_custom_reduce_scatter(comm)
                step(index)

            return one

        own, in_order = DefaultReduceScatter(), ReduceScatterInOrder()
        cpu: list[dict[str, float]] = []
        times = in_turn(dict(zip(NAMES, map(with_, (own, in_order, own)), strict=True)), rounds, cpu)
        return times, cpu


def told(title: str, rounds: Sequence[dict[str, float]]) -> None:
    """One line: the library's own in ms, and the ratios of the others to it."""
    words = [f"{title}  library {statistics.median(one['library'] for one in rounds) * 1e3:8.3f} ms"]
    for name in NAMES[1:]:
        median, low, high = interval_of_median([one[name] / one["library"] for one in rounds])
        words.append(f"{name} {median:.3f} ({low:.3f} to {high:.3f})")
    print("  ".join(words), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--spec", default=None, help="whole steps of this Spec")
    parser.add_argument("--zero", type=int, default=3)
    words = parser.parse_args()

    from fourfold.launch.pool import RankPool
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.record.run_dir import claim
    from fourfold.spec.load import load_spec

    with tempfile.TemporaryDirectory() as folder, RankPool(words.nproc, timeout_s=3600) as pool:
        if words.spec is not None:
            steps = len(NAMES) * (words.pairs + WARM_UP_STEPS)
            sets = [f"run.steps={steps}", f"layout.zero={words.zero}"]
            plan = make_run_plan(load_spec(words.spec, sets), words.nproc, ("benchmark",))
            run = claim(Path(folder) / "run")
            times, cpu = pool.run(measure_steps, plan.model_dump_json(), str(run.path), words.pairs)[0]
            print(f"a step of {words.spec}, zero {words.zero}, {words.nproc} ranks, {words.pairs} rounds")
            told("of the slowest rank", times)
            told("CPU, all ranks     ", cpu)
            return 0
        found = pool.run(measure, words.pairs, words.dtype)[0]
    print(f"{words.nproc} ranks, {words.dtype}, {words.pairs} rounds of each size; the library's own is 1")
    for size, rounds in found.items():
        told(f"{size // 1024:>7} KiB", rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
