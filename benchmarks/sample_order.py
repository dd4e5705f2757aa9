"""The order of 10^12 samples: time of a batch of 10^6 positions on one core, and memory beside 10^6 samples.

Prints the figures; exit code 3 when one is missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import tracemalloc

import numpy as np

from fourfold.data.order import SampleOrder

POSITIONS = 10**6
LARGE, SMALL = 10**12, 10**6
LONGEST_S = 1.0
MOST_MEMORY_RATIO = 1.1
REPEATS = 9


def seconds(order: SampleOrder, positions: np.ndarray) -> list[float]:
    """Wall time of each of the repeats, every one in an epoch of its own."""
    found = []
    for epoch in range(REPEATS):
        start = time.perf_counter()
        order.ids(epoch, positions)
        found.append(time.perf_counter() - start)
    return found


def peak_bytes(order: SampleOrder, positions: np.ndarray) -> int:
    """Most memory that Python and numpy held at once, the result included."""
    tracemalloc.start()
    order.ids(1, positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> int:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    large, small = SampleOrder(LARGE, seed=0), SampleOrder(SMALL, seed=0)
    far = np.arange(LARGE - POSITIONS, LARGE)
    near = np.arange(SMALL)
    times = seconds(large, far)
    memory = {LARGE: peak_bytes(large, far), SMALL: peak_bytes(small, near)}
    ratio = memory[LARGE] / memory[SMALL]
    print(f"{POSITIONS:,} positions of {LARGE:,} samples, one core, {REPEATS} repeats")
    print(
        f"  time    median {statistics.median(times):.3f} s, worst {max(times):.3f} s   (to reach: < {LONGEST_S} s)"
    )
    print(f"  memory  {memory[LARGE] / 2**20:.1f} MiB; for {SMALL:,} samples {memory[SMALL] / 2**20:.1f} MiB")
    print(
        f"          ratio {ratio:.3f}   (to reach: <= {MOST_MEMORY_RATIO}: independent of the number of samples)"
    )
    reached = max(times) < LONGEST_S and ratio <= MOST_MEMORY_RATIO
    print("reached" if reached else "missed")
    return 0 if reached else 3


if __name__ == "__main__":
    sys.exit(main())
