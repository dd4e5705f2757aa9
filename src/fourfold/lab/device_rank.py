"""What the rank of the device check does."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch

from fourfold.lab.memory_ranks import Held, measure
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan
from fourfold.record.run_dir import RunDir
from fourfold.spec.spec import Spec
from fourfold.train.loop import train
from fourfold.verify.here import joined_here


def held(spec: Spec) -> tuple[Held, int | None]:
    """What it held in two steps, and the most bytes that a CUDA device's allocator had given out at any time."""
    on_cuda = joined_here().device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    found = measure(spec)
    return found, torch.cuda.max_memory_allocated() if on_cuda else None


def trained(plan: RunPlan, run: Path) -> None:
    """Train as planned; its story goes to the log."""
    with redirect_stderr(StringIO()):
        train(plan, joined_here(), RunDir(run), StopRequest(), _unwatched)


def _unwatched(step: int, phase: str, patient: bool = False) -> None:
    """Nobody keeps this rank's pulse."""
