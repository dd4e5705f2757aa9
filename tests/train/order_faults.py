"""Transforms in which rank 1 calls a collective that the others do not, or keeps them waiting. No torch before that."""

from __future__ import annotations

import os
import time
from typing import Any

_AT = 17  # samples that a process has made in its fifth step of four
_calls = 0


def sleeps(sample: Any, generator: Any) -> Any:  # noqa: ARG001
    """It comes to its fifth step after the others have given up."""
    if _now():
        time.sleep(60)
    return sample


def one_more(sample: Any, generator: Any) -> Any:  # noqa: ARG001
    """It sums one tensor more."""
    if _now():
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(2, dtype=torch.int64))
    return sample


def another_kind(sample: Any, generator: Any) -> Any:  # noqa: ARG001
    """It waits in a barrier of its own."""
    if _now():
        import torch.distributed as dist

        dist.barrier()
    return sample


def in_another_order(sample: Any, generator: Any) -> Any:  # noqa: ARG001
    """All ranks sum two tensors of one shape; this one the second first, in the fifth step."""
    import torch
    import torch.distributed as dist

    a, b = torch.ones(2), torch.ones(2)
    if _now():
        dist.all_reduce(b)
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)
    return sample


def _now() -> bool:
    global _calls
    _calls += 1
    return os.environ["RANK"] == "1" and _calls == _AT
