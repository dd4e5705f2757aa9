"""What recompute costs in time and gives in memory: a step of the same model with none, selective and full.

    python benchmarks/recompute.py [--spec tiny] [--nproc 1] [--pairs 40] [--set model.layers=8 ...]

Four trainings live side by side in the same ranks: without recompute, without it again as a null control, selective and
full. They step in turn, in an order that alternates, between barriers; told are the medians of the paired ratios and
their 95 % bootstrap intervals. Bytes are counted, not timed: what a forward keeps for its backward, and the most alive
in a step. Exit code 3 if their losses after the last step differ: computed again are the same bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from paired import WARM_UP_STEPS, in_turn, interval_of_median

MODES = {"none": "none", "none again": "none", "selective": "selective", "full": "full"}


def loop(training: Any, rounds: int) -> Callable[[int], None]:
    """The product's step, without its record."""
    from fourfold.train.step import accumulate, agree_totals, clip, update

    supply: Iterator[Any] = enumerate(training.loader.steps(0, rounds))

    def step(_index: int) -> None:
        number, batches = next(supply)
        accumulate(training, batches, agree_totals(training, batches, False))
        clip(training)
        update(training, number)

    return step


def measure(
    source: str, sets: tuple[str, ...], pairs: int
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """In each rank: seconds of one step of each, per round, of the slowest rank; and each one's last loss."""
    import torch
    import torch.distributed as dist

    from fourfold.spec.load import load_spec
    from fourfold.spec.settle import settle
    from fourfold.train.setup import open_training
    from fourfold.verify.here import joined_here

    rounds = pairs + WARM_UP_STEPS
    losses = {}
    with ExitStack() as stack:
        trainings = {}
        for name, mode in MODES.items():
            spec = load_spec(source, [*sets, f'layout.recompute="{mode}"', f"run.steps={rounds}"]).spec
            settled = settle(spec, dist.get_world_size())
            trainings[name] = stack.enter_context(open_training(settled, joined_here()))
        times = in_turn({name: loop(one, rounds) for name, one in trainings.items()}, rounds)
        for name, one in trainings.items():
            batch = next(one.loader.steps(0, 1))[0]
            with torch.no_grad(), one.parallel.observing():
                losses[name] = float(one.parallel.module(batch)[0])
    return times, losses


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", default="tiny")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    words = parser.parse_args()

    from fourfold.launch.pool import RankPool
    from fourfold.plan.rehearsal import Rehearsal
    from fourfold.spec.load import load_spec
    from fourfold.spec.settle import settle
    from fourfold.train.rehearsal import rehearse

    with RankPool(words.nproc, timeout_s=3600) as pool:
        times, losses = pool.run(measure, words.spec, tuple(words.sets), words.pairs)[0]
    print(f"{words.spec} on {words.nproc} ranks {' '.join(words.sets)}, {len(times)} rounds")
    for name, mode in MODES.items():
        middle, low, high = interval_of_median([one[name] / one["none"] for one in times])
        spec = load_spec(words.spec, [*words.sets, f'layout.recompute="{mode}"']).spec
        seen = rehearse(settle(spec, words.nproc))
        assert isinstance(seen, Rehearsal)
        held = f"kept {seen.activations_bytes / 2**20:8.2f} MiB, at most {seen.peak_bytes / 2**20:8.2f} MiB"
        print(f"  {name:<10} time {middle:.3f} ({low:.3f} to {high:.3f}), {held}, loss {losses[name]!r}")
    return 0 if len(set(losses.values())) == 1 else 3


if __name__ == "__main__":
    sys.exit(main())
