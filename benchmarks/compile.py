"""What compiled blocks give: a step of the same model with blocks as they are, and as code of torch's compiler.

    python benchmarks/compile.py [--spec small] [--nproc 1] [--pairs 40] [--set layout.recompute=full ...]

Three trainings live side by side in the same ranks: plain, plain again as a null control, and compiled. They step in
turn, in an order that alternates, between barriers; told are the medians of the paired ratios and their 95 % bootstrap
intervals, and how long the first step of each took, with the making of its code. Exit code 3 if their losses after the
last step differ by more than rounding does.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from typing import Any

from paired import WARM_UP_STEPS, in_turn, interval_of_median
from recompute import loop

MODES = {"plain": "none", "plain again": "none", "compiled": "blocks"}
ALIKE = 1e-3  # of fp32, after some tens of steps


def measure(
    source: str, sets: tuple[str, ...], pairs: int
) -> tuple[list[dict[str, float]], dict[str, float], dict[str, float]]:
    """In each rank: seconds of one step of each, per round, of the slowest rank; first steps; and last losses."""
    import torch
    import torch.distributed as dist

    from fourfold.spec.load import load_spec
    from fourfold.spec.settle import settle
    from fourfold.train.setup import open_training
    from fourfold.verify.here import joined_here

    rounds = pairs + WARM_UP_STEPS
    losses, first = {}, {}
    with ExitStack() as stack:
        trainings: dict[str, Any] = {}
        for name, mode in MODES.items():
            spec = load_spec(source, [*sets, f'layout.compile="{mode}"', f"run.steps={rounds + 1}"]).spec
            settled = settle(spec, dist.get_world_size())
            trainings[name] = stack.enter_context(open_training(settled, joined_here()))
        loops = {name: loop(one, rounds + 1) for name, one in trainings.items()}
        for name, step in loops.items():
            dist.barrier()
            start = time.perf_counter()
            step(0)
            first[name] = time.perf_counter() - start
        times = in_turn(loops, rounds)
        for name, one in trainings.items():
            batch = next(one.loader.steps(0, 1))[0]
            with torch.no_grad(), one.parallel.observing():
                losses[name] = float(one.parallel.module(batch)[0])
    return times, first, losses


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", default="small")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="a.b=value")
    words = parser.parse_args()

    from fourfold.launch.pool import RankPool

    with RankPool(words.nproc, timeout_s=3600) as pool:
        times, first, losses = pool.run(measure, words.spec, tuple(words.sets), words.pairs)[0]
    print(
        f"{words.spec} on {words.nproc} ranks {' '.join(words.sets)}, {len(times)} rounds; seconds of a step"
    )
    for name in MODES:
        fastest = min(t[name] for t in times)
        ratio = "" if name == "plain" else "{:.4f} ({:.4f} to {:.4f}) of plain"
        found = ratio.format(*interval_of_median([t[name] / t["plain"] for t in times]))
        print(f"  {name:<12} fastest {fastest:.4f}, first step {first[name]:.1f} s  {found}")
    reference = losses["plain"]
    alike = all(abs(loss - reference) <= ALIKE * abs(reference) for loss in losses.values())
    print(f"losses after the last step {'alike' if alike else 'NOT ALIKE'}: {losses}")
    return 0 if alike else 3


if __name__ == "__main__":
    sys.exit(main())
