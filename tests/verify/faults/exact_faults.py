"""Mistakes in exact mode, planted in every rank before a check: each leaves the sums right to rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.collectives import tree
from fourfold.data import schedule
from fourfold.parallel import apply, clip, leaves
from fourfold.train import optimizer, setup


def one_by_one() -> None:
    """Microbatches are added up in the order in which they come."""
    made = leaves.Leaves.__init__

    def left_to_right(self: leaves.Leaves) -> None:
        made(self, lambda count: [0, *[1] * (count - 1)])

    leaves.Leaves.__init__ = left_to_right  # type: ignore[method-assign,assignment]


def ranks_in_turn() -> None:
    """Ranks are added one after the other, not pair by pair."""

    def added(parts: Tensor, out: Tensor) -> Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return out.copy_(total)

    tree.sum_in_order = added


def scattered_microbatches() -> None:
    """Microbatches go round the ranks: what a rank sums is no branch of the tree."""
    made = setup.batch_schedule

    def round_robin(*args: Any) -> schedule.BatchSchedule:
        from dataclasses import replace

        return replace(made(*args), by_rank=False)

    setup.batch_schedule = round_robin


def norm_of_shards() -> None:
    """The norm is that of what each rank holds, then of these."""

    def norm(parameters: Any, device: torch.device, speaks: bool) -> Tensor:  # noqa: ARG001
        return clip.GradientNorm(_grid(), dist.get_rank())(parameters, device)

    apply.exact_norm = norm


def fused_update() -> None:
    """AdamW by the fused kernel."""
    made = optimizer.Optimizer.__init__

    def fused(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **{**more, "elementwise": False})

    optimizer.Optimizer.__init__ = fused  # type: ignore[method-assign]


def rounded_losses() -> None:
    """Losses are added up in fp32, first those of a rank."""
    from fourfold.collectives import sums
    from fourfold.verify import exact_rank

    def added(values: Any) -> list[float]:
        own = [float(torch.tensor(of_step, dtype=torch.float32).sum()) for of_step in values]
        return [float(total) for total in sums.sum_floats(torch.tensor(own, dtype=torch.float64))]

    exact_rank.sum_exactly = added


def _grid() -> Any:
    from fourfold.spec.grid import Grid

    return Grid(dp_shard=dist.get_world_size())
