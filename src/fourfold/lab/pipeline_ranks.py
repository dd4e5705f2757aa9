"""What each rank of the pipeline exercise does: torch's own stages and schedules, with time that is slept.

Two cores cannot compute on four ranks at once. So every pass sleeps for as long as it is said to cost, beside a small
matrix product whose gradients are held against one device.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from fourfold.parallel.pipeline_order import new_schedule, stages_of_ranks
from fourfold.plan.pipeline_time import Action, Slot, Timeline
from fourfold.spec.schedules import SCHEDULES

ROWS, WIDTH = 2, 4  # of a microbatch's activations
STEPS = 3  # that are timed, after one that is not; the quickest counts


class Ran(NamedTuple):
    """What a rank did in its quickest step, on the machine's clock in s, and its gradients, by stage."""

    slots: tuple[Slot, ...]
    gradients: dict[int, Tensor]


class Cost(torch.autograd.Function):
    """The identity; passing takes time, and so does the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there_s: float, back_s: float) -> Tensor:
        ctx.back_s = back_s
        time.sleep(there_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.back_s)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """One stage: tanh of a matrix product in fp64. The input's way back and the weight's take `unit_s` each."""

    def __init__(self, stage: int, unit_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_of(stage))
        self.unit_s = unit_s

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        back_s = self.unit_s if x.requires_grad else 2 * self.unit_s  # stage 0 has no input to go back to
        x = Cost.apply(x, self.unit_s, self.unit_s)  # type: ignore[no-untyped-call]
        weight = Cost.apply(self.weight, 0.0, back_s)  # type: ignore[no-untyped-call]
        return torch.tanh(x @ weight)


def weight_of(stage: int) -> Tensor:
    """A stage's weight: fp64 [width, width], the same everywhere."""
    return torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(stage))


def input_of(microbatches: int, replica: int = 0) -> Tensor:
    """What a step begins with: fp64 [microbatches × rows, width]."""
    draw = torch.Generator().manual_seed(1000 + replica)
    return torch.randn(microbatches * ROWS, WIDTH, dtype=torch.float64, generator=draw)


def loss_of(output: Tensor, _: Tensor) -> Tensor:
    """A sum, so that microbatches add up."""
    return (output * output).sum()


def measure(name: str, microbatches: int, stages_per_rank: int, unit_s: float) -> Ran:
    """Run steps of the schedule `name` over all ranks. Collectives: a barrier a step; sends between stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    indices = stages_of_ranks(name, ranks, stages_per_rank)[rank]
    modules = {index: Sleeper(index, unit_s) for index in indices}
    stages = [_stage(module, index, ranks * stages_per_rank) for index, module in modules.items()]
    slots = _watched(stages)
    schedule = new_schedule(name, stages, microbatches, loss_of)
    best: tuple[Slot, ...] = ()
    spans = []
    for _ in range(STEPS + 1):
        slots.clear()
        for module in modules.values():
            module.zero_grad()
        dist.barrier()
        _step(schedule, indices, ranks * stages_per_rank - 1, input_of(microbatches))
        spans.append(_span(slots))
        if len(spans) > 1 and spans[-1] == min(spans[1:]):  # the same step on every rank
            best = tuple(slots)
    return Ran(best, {index: module.weight.grad.clone() for index, module in modules.items()})  # type: ignore[union-attr]


def sharded_gradients(microbatches: int) -> dict[tuple[str, bool], dict[int, Tensor | None]]:
    """Gradients by stage of a step of every schedule, on 2 pipeline ranks × 2 that shard each stage with FSDP2.

    Returns by (schedule, whether parameters are dropped after each forward) whole gradients, the mean over the two
    that see different inputs; None where there is none. Collectives: FSDP2's over the inner axis of the mesh, sends
    over the outer one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return {
        (name, reshard): _sharded(name, microbatches, mesh["pp"], mesh["dp"], reshard)
        for name in SCHEDULES
        for reshard in (True, False)
    }


def _sharded(
    name: str, microbatches: int, pipe: DeviceMesh, shards: DeviceMesh, reshard: bool
) -> dict[int, Tensor | None]:
    per_rank = 2 if SCHEDULES[name].several else 1
    indices = stages_of_ranks(name, 2, per_rank)[pipe.get_local_rank()]
    modules = {index: Sleeper(index, 0.0) for index in indices}
    for module in modules.values():
        fully_shard(module, mesh=shards, reshard_after_forward=reshard)
    stages = [_stage(module, index, 2 * per_rank, pipe.get_group()) for index, module in modules.items()]
    schedule = new_schedule(name, stages, microbatches, loss_of)
    _step(schedule, indices, 2 * per_rank - 1, input_of(microbatches, shards.get_local_rank()))
    found: dict[int, Tensor | None] = {}
    for index, module in modules.items():
        gradient = module.weight.grad
        found[index] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def one_device(stages: int, x: Tensor) -> dict[int, Tensor]:
    """The gradients of all stages' weights on one device, from the whole input at once."""
    weights = [weight_of(stage).requires_grad_() for stage in range(stages)]
    for weight in weights:
        x = torch.tanh(x @ weight)
    loss_of(x, x).backward()  # type: ignore[no-untyped-call]
    return {stage: weight.grad for stage, weight in enumerate(weights) if weight.grad is not None}


def as_timeline(ran: list[Ran]) -> Timeline:
    """All ranks' steps on one clock that begins at 0."""
    begin = min(slot.start for one in ran for slot in one.slots)
    return Timeline(
        tuple(tuple(Slot(a, start - begin, end - begin) for a, start, end in one.slots) for one in ran)
    )


def _stage(module: nn.Module, index: int, count: int, group: Any = None) -> PipelineStage:
    """With shapes told, and which of them carry gradients: torch would find them out by a forward more."""
    there, back = (
        torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta", requires_grad=needed)
        for needed in (index > 0, True)
    )
    return PipelineStage(
        module, index, count, torch.device("cpu"), input_args=there, output_args=back, group=group
    )


def _step(schedule: Any, indices: list[int], last: int, x: Tensor) -> None:
    args = (x,) if 0 in indices else ()
    target = torch.zeros_like(x) if last in indices else None
    schedule.step(*args, target=target)


def _span(slots: list[Slot]) -> float:
    """From the first start to the last end over all ranks, in s."""
    ends = torch.tensor([-slots[0].start, slots[-1].end], dtype=torch.float64)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return float(ends.sum())


def _watched(stages: list[PipelineStage]) -> list[Slot]:
    """What these stages do from now on goes into the list that is returned."""
    slots: list[Slot] = []

    def watch(stage: Any, method: str) -> None:
        run = getattr(stage, method)

        def timed(microbatch: int, *args: Any, **more: Any) -> Any:
            kind: Any = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}.get(method)
            kind = kind or ("B" if more.get("full_backward", True) else "I")
            start = time.monotonic()
            try:
                return run(microbatch, *args, **more)
            finally:
                slots.append(Slot(Action(stage.stage_index, kind, microbatch), start, time.monotonic()))

        setattr(stage, method, timed)

    for stage in stages:
        for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            watch(stage, method)
    return slots
