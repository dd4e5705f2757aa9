"""How two loops of training are timed against each other: in turn, in the same ranks, on the same batches."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

LIMIT = 1.02
WARM_UP_STEPS = 6


def asked(description: str | None) -> argparse.Namespace:
    """What the command line says: a Spec, ranks, and how many pairs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", default="small")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--exact", action="store_true", help="Fourfold in exact mode (run.exact = true)")
    return parser.parse_args()


def fourfold_loop(
    training: Any,
    record: Any,
    steps: int,
    around: Callable[[int], AbstractContextManager[None]] | None = None,
) -> Callable[[int], None]:
    """The product's loop body, call for call as in train/loop.py.

    around: entered around each update, by the number of the step; by default what looks at invariants.
    """
    from fourfold.train.checks import check_step
    from fourfold.train.invariants import Invariants
    from fourfold.train.step import accumulate, agree_totals, clip, update

    invariants = Invariants(training)
    looked_at = around or (lambda number: invariants.around(number, saves=False))
    supply = enumerate(training.loader.steps(0, steps))

    def step(_index: int) -> None:
        number, batches = next(supply)
        pending = agree_totals(training, batches, stop_requested=False)
        pair, totals = accumulate(training, batches, pending)
        norm = clip(training)
        check_step(training, batches, pair, norm)
        with looked_at(number):
            rate = update(training, number)
        record.step(number, batches, pair, norm, rate, totals)

    return step


def in_turn(
    loops: Mapping[str, Callable[[int], None]], rounds: int, cpu: list[dict[str, float]] | None = None
) -> list[dict[str, float]]:
    """Seconds of one step of each loop, per round after the warm-up; a round's time is that of the slowest rank.

    cpu: gets the same in CPU seconds, of all ranks together: other work on the machine changes them little.
    The order alternates, and barriers stand between. Every rank calls.
    """
    import torch
    import torch.distributed as dist

    times: list[dict[str, float]] = []
    for index in range(rounds):
        order = list(loops)
        order = order[index % len(order) :] + order[: index % len(order)]
        if index % 2:
            order.reverse()
        seconds, worked = dict.fromkeys(loops, 0.0), dict.fromkeys(loops, 0.0)
        for name in order:
            dist.barrier()
            start, work = time.perf_counter(), time.process_time()
            loops[name](index)
            seconds[name], worked[name] = time.perf_counter() - start, time.process_time() - work
        slowest = torch.tensor([seconds[name] for name in loops], dtype=torch.float64)
        together = torch.tensor([worked[name] for name in loops], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(together)
        times.append(dict(zip(loops, slowest.tolist(), strict=True)))
        if cpu is not None and index >= WARM_UP_STEPS:
            cpu.append(dict(zip(loops, together.tolist(), strict=True)))
    return times[WARM_UP_STEPS:]


def interval_of_median(values: Sequence[float], draws: int = 4000) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return statistics.median(values), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def told(title: str, times: Sequence[Mapping[str, float]]) -> float:
    """Print medians and ratios; returns the lower end of the interval that is judged, of fourfold over plain."""
    print(f"{title}, {len(times)} rounds; seconds of a step, median")
    for name in times[0]:
        print(f"  {name:<12} {statistics.median(t[name] for t in times):.4f}")
    lower = {}
    for name in ("fourfold", "plain again"):
        median, low, high = interval_of_median([t[name] / t["plain"] for t in times])
        lower[name] = low
        print(f"  {name} / plain: median {median:.4f}, 95 % interval {low:.4f} to {high:.4f}")
    return lower["fourfold"]


def judged(lower_end: float, alike: bool = True, limit: float = LIMIT) -> int:
    """The exit code: 0, or 3 where the lower end is beyond the limit or the loops did not train alike."""
    passed = lower_end <= limit and alike
    print(f"lower end {lower_end:.4f} <= {limit}: {'pass' if passed else 'FAIL'}")
    return 0 if passed else 3
