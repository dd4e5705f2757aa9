"""A reduce-scatter as an all-to-all and sums in one order, against the backend's own.

    python benchmarks/reduce_scatter.py [--nproc 2] [--pairs 60]

For each size (bytes of one rank's input) both run in turn in the same ranks, in an order that alternates, between
barriers, and the library's own once more as a null control. Told are medians of paired ratios with their 95 % bootstrap
intervals. Nothing is judged: it says from which size on the sums in order are faster here.
"""

from __future__ import annotations

import argparse
import sys
import time

from paired import interval_of_median

SIZES = (2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
WARM_UP = 5


def measure(pairs: int) -> dict[int, list[dict[str, float]]]:
    """In each rank: seconds of one call of each, by size and round; a round's time is that of the slowest rank."""
    import torch
    import torch.distributed as dist

    from fourfold.collectives.tree import reduce_scatter

    world = dist.get_world_size()

    def library(output: torch.Tensor, source: torch.Tensor) -> None:
        dist.reduce_scatter_single(output, source)

    def in_order(output: torch.Tensor, source: torch.Tensor) -> None:
        reduce_scatter(output, source, None)

    calls = {"library": library, "in order": in_order, "library again": library}
    found: dict[int, list[dict[str, float]]] = {}
    for size in SIZES:
        source = torch.randn(size // 4 // world * world)
        output = torch.empty(source.numel() // world)
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=60)
    words = parser.parse_args()

    from fourfold.launch.pool import RankPool

    with RankPool(words.nproc, timeout_s=3600) as pool:
        found = pool.run(measure, words.pairs)[0]
    print(f"{words.nproc} ranks, {words.pairs} rounds of each size; the library's own is 1")
    for size, rounds in found.items():
        own = sorted(one["library"] for one in rounds)[len(rounds) // 2]
        told = [f"{size // 1024:>7} KiB  library {own * 1e3:8.3f} ms"]
        for name in ("in order", "library again"):
            median, low, high = interval_of_median([one[name] / one["library"] for one in rounds])
            told.append(f"{name} {median:.3f} ({low:.3f} to {high:.3f})")
        print("  ".join(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
