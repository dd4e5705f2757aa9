"""The order in which torch's pipeline schedules act, taken down from the schedules themselves.

The order that torch prints of its own (`pipeline_order`) is not everywhere the one it runs: that of 1F1B counts the
last rank's microbatches from 1. So a schedule runs here as it would, on stages that compute and send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from fourfold.plan.pipeline_time import Action
from fourfold.spec.schedules import SCHEDULES

Orders = tuple[tuple[Action, ...], ...]


def stages_of_ranks(name: str, ranks: int, stages_per_rank: int) -> list[list[int]]:
    """Which stages each rank has under the schedule `name`: in turns, or folded as a V."""
    style = "v" if SCHEDULES[name].v_shaped else "loop"
    homes = generate_rank_to_stage_mapping(ranks, ranks * stages_per_rank, style=style)
    return [homes[rank] for rank in range(ranks)]


def new_schedule(name: str, stages: Sequence[Any], microbatches: int, loss: Any = None) -> Any:
    """torch's schedule over one rank's stages; gradients are sums, not divided by the number of microbatches.

    Collectives: none; torch's own ValueError where it refuses so many microbatches (`plan.pipeline_schedules.why_not`).
    """
    kind = getattr(pipelining, SCHEDULES[name].torch_class)
    own = list(stages) if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return kind(own, microbatches, loss_fn=loss, scale_grads=False)


def orders_of(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Orders:
    """Every rank's actions in a step under the schedule `name`, in the order in which torch runs them."""
    orders = []
    count = ranks * stages_per_rank
    for rank, indices in enumerate(stages_of_ranks(name, ranks, stages_per_rank)):
        done: list[Action] = []
        stages = [_Mute(index, count, rank, ranks, done) for index in indices]
        schedule = new_schedule(name, stages, microbatches)
        # Buffers and shapes are of stages that send something.
        schedule._initialize_stage = schedule._initialize_stages = lambda *_: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        orders.append(tuple(done))
    return tuple(orders)


class _Mute:
    """What a schedule asks of a stage, and nothing behind it: actions are taken down."""

    submod = None  # asked whether it is FSDP2's
    device = torch.device("cpu")
    has_backward = True

    def __init__(self, index: int, count: int, rank: int, ranks: int, done: list[Action]) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = index == 0, index == count - 1
        self._done = done

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self._done.append(Action(self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch: int, *, full_backward: bool = True, **_: Any) -> None:
        self._done.append(Action(self.stage_index, "B" if full_backward else "I", microbatch))

    def backward_weight_one_chunk(self, microbatch: int, **_: Any) -> None:
        self._done.append(Action(self.stage_index, "W", microbatch))

    def get_fwd_recv_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, *_: Any) -> None:
        pass

    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = perform_reduce_grad
