"""Ranks of the pipeline exercise that do something else than what is drawn: planted in each before it."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe

from fourfold.lab import pipeline_ranks


def another_schedule() -> None:
    """1F1B runs where GPipe was asked for."""
    keep = pipeline_ranks.new_schedule
    pipeline_ranks.new_schedule = lambda name, *more: keep("1f1b" if name == "gpipe" else name, *more)


def rank_1_is_slow() -> None:
    """Its passes take three times as long."""
    if dist.get_rank() == 1:
        sleep = time.sleep
        time.sleep = lambda seconds: sleep(3 * seconds)  # type: ignore[assignment]


def gradients_are_scaled() -> None:
    """The schedule divides by the number of microbatches, as torch does by default."""
    keep = ScheduleGPipe.__init__

    def made(self: Any, *args: Any, **more: Any) -> None:
        keep(self, *args, **{**more, "scale_grads": True})

    ScheduleGPipe.__init__ = made  # type: ignore[method-assign]
