"""What the rank of the device check does."""

from __future__ import annotations

import torch

from fourfold.lab.memory_ranks import Held, measure
from fourfold.spec.spec import Spec
from fourfold.verify.here import joined_here


def held(spec: Spec) -> tuple[Held, int | None]:
    """What it held in two steps, and the most bytes that a CUDA device's allocator had given out at any time."""
    on_cuda = joined_here().device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    found = measure(spec)
    return found, torch.cuda.max_memory_allocated() if on_cuda else None
