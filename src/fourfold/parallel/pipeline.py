"""Pipeline parallel: the microbatches of a step pass through stages on the ranks of "pp", by a schedule of torch's.

torch.distributed.pipelining runs the schedule (Huang et al., arXiv 1811.06965; the others: `spec.schedules`): it sends
the stream to the next stage and its gradient back. Shapes are told beforehand, so that no microbatch runs once more to
find them out; gradients are summed, not divided by the number of microbatches. Every rank of a pipeline loads the same
rows, so that only the stream travels; rows, documents and draws are there on each stage.

Collectives, all on "pp": for each microbatch and each border between two stages on two ranks one tensor forward and one
backward; where the first and the last stage share a parameter, one all-reduce of its gradient between those two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fourfold.data.batch import Batch
from fourfold.models.carried import loss_elsewhere
from fourfold.models.protocol import ModelKit, StagedKit
from fourfold.parallel.data_parallel import Alone, Replicas
from fourfold.parallel.mesh import sub_mesh
from fourfold.parallel.narrow import stream_dtype
from fourfold.parallel.pipeline_order import new_schedule
from fourfold.parallel.sharded import Sharded
from fourfold.spec.boxes import shard_range
from fourfold.spec.errors import CheckFailed, Problem
from fourfold.spec.grid import Grid
from fourfold.spec.schedules import SCHEDULES, rank_of, stages_in_all
from fourfold.spec.training import LayoutSpec, PrecisionSpec

Weigh = Callable[[Tensor], Tensor]
Factor = Callable[[], float]
Around = Callable[[int], AbstractContextManager[None]]
Pair = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Part:
    """One stage of this rank. index: its place among all stages; module: wrapped, called with (batch, stream)."""

    index: int
    module: nn.Module
    reduction: Alone | Replicas | Sharded


@dataclass(slots=True)
class _Step:
    """What the stages need to know of the step at hand: its microbatches, and what comes out of them."""

    batches: Sequence[Batch]
    around: Around
    factor: Factor
    pairs: dict[int, Pair] = field(default_factory=dict)


class _Shell(nn.Module):
    """A stage as torch's pipelining calls it: it knows a microbatch by its number."""

    def __init__(self, pipeline: Pipeline, part: Part) -> None:
        super().__init__()
        self.inner = part.module
        self._computed = (pipeline, part)  # in a tuple: no part of this module

    def forward(self, *stream: Tensor, micro: int) -> Tensor:
        pipeline, part = self._computed
        return pipeline.computed(part, micro, stream[0] if stream else None)


class _Stage(PipelineStage):
    """torch's stage, with the reduction of this rank's replicas and shards around each backward.

    begins: told before a backward that does not begin with the loss.
    """

    def __init__(
        self, shell: _Shell, part: Part, splits: bool, begins: Callable[[], Any], **told: Any
    ) -> None:
        super().__init__(shell, part.index, **told)
        self._reduction, self._splits, self._begins = part.reduction, splits, begins

    # Whether shapes are to be found out is decided over all stages, by messages: they are known here.
    def _warmup_forward_vote(self, has_backward: bool, received_acc: Any = None) -> Any:  # noqa: ARG002
        return _YES

    def _warmup_backward_result(self, received_result: Any = None) -> Any:  # noqa: ARG002
        return _YES

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if not self.is_last:
            self._begins()
        with self._reduction.microbatch(last_backward):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The end of a step: what was not reduced in its last backward is reduced now."""
        assert grad_scale_factor == 1, "gradients are sums"
        if self._splits and isinstance(self._reduction, Sharded):
            self._reduction.reduce_split()


class _Yes:
    """One, as a tensor is asked for it."""

    def item(self) -> int:
        return 1


_YES = _Yes()


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """A schedule of torch's over the stages of this rank, for so many microbatches of one shape."""

    microbatches: int
    shape: tuple[int, ...]
    stages: list[Any]
    torchs: Any


class Pipeline:
    """The stages of this rank, and the schedule that runs them with those of the others."""

    def __init__(
        self,
        index: Sequence[int],
        reductions: Sequence[Alone | Replicas | Sharded],
        kit: ModelKit,
        layout: LayoutSpec,
        device: torch.device,
        precision: PrecisionSpec,
    ) -> None:
        """index: of each of this rank's stages among all of them; reductions: of each, around its module."""
        assert isinstance(kit, StagedKit), "in_stages has refused others"
        self.parts = tuple(Part(at, one.module, one) for at, one in zip(index, reductions, strict=True))
        self._kit, self._layout, self._device = kit, layout, device
        self._dtype, grid = stream_dtype(precision), Grid.of(layout)
        mesh = sub_mesh(grid, device.type, "pp")
        self._tp = sub_mesh(grid, device.type, "tp") if grid.tp > 1 else None
        self._group, self._here = mesh.get_group(), mesh.get_local_rank()
        self._stages = stages_in_all(layout)
        self._step = _no_step()
        self._weigh: Weigh = lambda total: total
        self._schedule: _Scheduled | None = None

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return any(part.index == self._stages - 1 for part in self.parts)

    def run(self, batches: Sequence[Batch], weigh: Weigh, factor: Factor, around: Around) -> list[Pair]:
        """Forward and backward of all microbatches of a step; gives the loss of each as (sum, count), or zeros.

        weigh: from the sum of a microbatch's loss to what its backward begins with; called on the rank of the last
        stage. factor: what it multiplies it with, the same for every microbatch; asked for before each backward of the
        other stages, and where a part of the loss is theirs. around: entered for each forward of a microbatch, by its
        number.
        Collectives: those of the module, and of the data-parallel reduction of each stage.
        """
        self._step, self._weigh = _Step(batches, around, factor), weigh
        schedule = self._scheduled(len(batches), self._shape(batches[0]))
        numbers = list(range(len(batches)))
        for stage in schedule.stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        try:
            with _quiet():
                schedule.torchs._step_microbatches(
                    kwarg_mbs=[{"micro": number} for number in numbers],
                    target_mbs=numbers,
                    return_outputs=False,
                )
        except RuntimeError as error:
            if isinstance(
                error.__cause__, Exception
            ):  # torch says what the arguments were, and hides the error
                raise error.__cause__ from None
            raise
        pairs = [self._step.pairs.get(micro) or self._none() for micro in range(len(batches))]
        self._step = _no_step()
        return pairs

    @torch.no_grad()
    def forward(self, batch: Batch) -> Pair:
        """The loss of one microbatch as (sum, count), without a backward; zeros where the last stage is not here."""
        self._step = _no_step([batch])
        sent: list[tuple[dist.Work, Tensor]] = []
        stream: Tensor | None = None
        for part in self.parts:
            if part.index and (source := rank_of(self._layout, part.index - 1)) != self._here:
                stream = torch.empty(self._shape(batch), dtype=self._dtype, device=self._device)
                dist.recv(stream, group=self._group, group_src=source)
            stream = self.computed(part, 0, stream if part.index else None)
            if part.index + 1 < self._stages and (to := rank_of(self._layout, part.index + 1)) != self._here:
                work = dist.isend(stream, group=self._group, group_dst=to)
                assert work is not None, "this rank is in the group"
                sent.append((work, stream))
        for work, _ in sent:
            work.wait()
        return self._step.pairs.get(0) or self._none()

    def computed(self, part: Part, micro: int, stream: Tensor | None) -> Tensor:
        """What a stage gives for a microbatch: the stream as it is sent, or the sum of the loss."""
        batch = self._step.batches[micro]
        with self._step.around(micro), self._loss_of(part):
            given = part.module(batch, None if stream is None else self._entered(stream, batch))
        if isinstance(given, Tensor):
            return self._leaving(given, batch)
        total, count = given
        self._step.pairs[micro] = (total.detach(), count.detach())
        return total  # type: ignore[no-any-return]

    def _loss_of(self, part: Part) -> AbstractContextManager[None]:
        """Around the forward of a stage: backward comes to the loss first, or begins with what was received."""
        return nullcontext() if part.index + 1 == self._stages else loss_elsewhere(self._step.factor)

    def _entered(self, stream: Tensor, batch: Batch) -> Tensor:
        """What was received, as the modules take it: cut between tensor-parallel ranks, or whole on each."""
        if self._tp is None:
            return stream
        shape = torch.Size(self._kit.stream(batch))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            stream, self._tp, [self._placement(shape)], run_check=False, shape=shape, stride=stride
        )

    def _leaving(self, given: Tensor, batch: Batch) -> Tensor:
        """What goes to the next stage: plain, and as large as it was told."""
        if isinstance(given, DTensor) and self._tp is not None:
            given = given.redistribute(self._tp, [self._placement(given.shape)]).to_local()
        expected = self._shape(batch)
        if given.shape != expected or given.dtype != self._dtype:
            raise CheckFailed(_other_stream(given, expected, self._dtype))
        # torch cuts the graph at what was sent, in place: it must be a tensor of its own.
        return given.clone() if given._is_view() else given.contiguous()

    def _placement(self, shape: Sequence[int]) -> Placement:
        return Shard(len(shape) - 2) if self._layout.sp and len(shape) > 1 else Replicate()

    def _shape(self, batch: Batch) -> tuple[int, ...]:
        """Of the stream of a microbatch, as this rank sends it."""
        shape = [*self._kit.stream(batch)]
        if self._tp is not None and self._layout.sp:
            _, shape[-2] = shard_range(shape[-2], self._tp.size(), self._tp.get_local_rank())
        return tuple(shape)

    def _scheduled(self, microbatches: int, shape: tuple[int, ...]) -> _Scheduled:
        made = self._schedule
        if made is None or (made.microbatches, made.shape) != (microbatches, shape):
            made = self._schedule = self._made(microbatches, shape)
        return made

    def _made(self, microbatches: int, shape: tuple[int, ...]) -> _Scheduled:
        """torch's schedule, over stages that know the shape of what they take and give."""
        name: str = self._layout.pp_schedule
        stream = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        stages: list[Any] = [
            _Stage(
                _Shell(self, part),
                part,
                SCHEDULES[name].splits,
                lambda: self._step.factor(),
                num_stages=self._stages,
                device=self._device,
                input_args=(stream,) if part.index else (),
                output_args=(stream,) if part.index + 1 < self._stages else (loss,),
                group=self._group,
            )
            for part in self.parts
        ]
        if name == "1f1b" and microbatches < self._stages:
            name = "interleaved-1f1b"  # torch's 1F1B has no such order; this one, of one stage a rank, has it
        torchs = new_schedule(name, stages, microbatches, self._loss)
        return _Scheduled(microbatches, shape, stages, torchs)

    def _loss(self, total: Tensor, _micro: int) -> Tensor:
        return self._weigh(total)

    def _none(self) -> Pair:
        nothing = torch.zeros((), device=self._device)
        return nothing, nothing.long()


def _no_step(batches: Sequence[Batch] = ()) -> _Step:
    """Between two steps, or for a forward without a backward."""
    return _Step(batches, lambda _: nullcontext(), lambda: 1.0)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs its whole schedule where a rank raises; the error itself is told."""
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _other_stream(given: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Problem:
    return Problem(
        asked=f"a stream of {tuple(shape)} in {dtype} between two stages, as the model's stream() says",
        found=f"{tuple(given.shape)} in {given.dtype}",
        why="the next stage waits for exactly that: the ranks would not meet",
        instead="a stream() that gives the shape of what every block gives, and blocks that keep its dtype",
    )
