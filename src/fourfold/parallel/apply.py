"""How a model is spread over ranks: a page of calls, in the order in which they must happen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from fourfold.data.batch import Batch
from fourfold.models.protocol import Heads, LossModule, Rule
from fourfold.parallel.balance import Balance
from fourfold.parallel.clip import GradientNorm
from fourfold.parallel.compile import compiled
from fourfold.parallel.context_parallel import ContextParallel
from fourfold.parallel.data_parallel import Alone, Replicas, moved
from fourfold.parallel.every_block import EveryBlock
from fourfold.parallel.exact_norm import exact_norm
from fourfold.parallel.expert_parallel import expert_parallel
from fourfold.parallel.leaves import Leaves
from fourfold.parallel.mesh import stage_group, sub_mesh
from fourfold.parallel.offload import home
from fourfold.parallel.pipeline import Around, Factor, Pair, Pipeline, Weigh
from fourfold.parallel.recompute import recompute, told_by_block
from fourfold.parallel.rehearsed_replicas import replicas
from fourfold.parallel.sharded import Sharded, replaced
from fourfold.parallel.stages import in_stages, whole
from fourfold.parallel.tensor_parallel import sum_partial, tensor_parallel
from fourfold.parallel.tied import Tied
from fourfold.parallel.trail import Trail, held_back
from fourfold.spec.errors import CheckFailed
from fourfold.spec.grid import Grid
from fourfold.spec.training import LayoutSpec, PrecisionSpec

Norm = Callable[[Sequence[nn.Parameter], torch.device], torch.Tensor]
"""The global norm of all gradients: `clip.GradientNorm`, or `exact_norm`."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """A model spread over ranks.

    modules: the stages of this rank, or the whole model, each called like a bare loss module. network: all that this
    rank has of it. degree: over how many ranks the global batch is cut; dp_rank: which cut.
    counts: whether this rank speaks for its targets, where several compute the same ones. speaks: for its samples.
    joined: under tensor parallel each module that has parameters, by name, with its rule; else empty. trail: of those.
    balance: of routers, moved once a step. leaves: in exact mode, the gradients of microbatches.
    """

    modules: tuple[LossModule, ...]
    network: nn.Module
    grid: Grid
    degree: int
    dp_rank: int
    counts: bool
    speaks: bool
    context: ContextParallel | None
    pipeline: Pipeline | None
    tied: Tied | None
    reductions: tuple[Alone | Replicas | Sharded, ...]
    norm: Norm
    balance: Balance
    joined: Mapping[str, Rule]
    trail: Trail | None
    leaves: Leaves | None = None

    @property
    def module(self) -> nn.Module:
        """The model in one piece, called like the bare loss module."""
        (reduction,) = self.reductions
        return reduction.module

    @property
    def loss_factor(self) -> int:
        """What the loss is multiplied with before backward, so that gradients are summed over ranks."""
        averaged = isinstance(self.reductions[0], Replicas) and self.leaves is None
        return self.degree * self.grid.cp if averaged else 1

    @property
    def share(self) -> int:
        """Which part of a global batch this rank computes: of its samples, and of their tokens."""
        return self.dp_rank * self.grid.cp + (0 if self.context is None else self.context.rank)

    @property
    def has_loss(self) -> bool:
        """Whether what this rank computes ends in the loss."""
        return self.pipeline is None or self.pipeline.is_last

    def own(self, batch: Batch) -> Batch:
        """What this rank computes of a microbatch of its samples: all of it, or some tokens of each row."""
        return batch if self.context is None else self.context.own(batch)

    def run(self, batches: Sequence[Batch], weigh: Weigh, factor: Factor, around: Around) -> list[Pair]:
        """Forward and backward of all microbatches of a step; the loss of each as (sum, count), 0 where it is not.

        weigh: from the sum of a microbatch's loss to what its backward begins with. factor: what it multiplies it with,
        asked for when a backward begins without the loss. around: entered for each forward, by the number of its
        microbatch. Afterwards every gradient is the sum over all samples of the step.
        Collectives: those of the modules and stages; the gradients' reduction, in the last backward or in each.
        Raises CheckFailed where a gradient was left unreduced.
        """
        pairs = []
        if self.pipeline is not None:
            if self.tied is not None:
                self.tied.follow()
            with self._cut(), told_by_block(self.network):
                pairs = self.pipeline.run(batches, weigh, factor, around)
            if self.context is not None:
                self.context.check()
        else:
            if self.leaves is not None:
                self.leaves.begin(len(batches))
            for number, batch in enumerate(batches):
                with self.microbatch(last=number + 1 == len(batches)):
                    with around(number):
                        total, count = self.module(batch)
                    weigh(total).backward()  # type: ignore[no-untyped-call]
                pairs.append((total.detach(), count))
        self.finish()
        return pairs

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch of a step, of a model in one piece."""
        (reduction,) = self.reductions
        with reduction.microbatch(last), self._cut(), told_by_block(self.network):
            yield
        if self.context is not None:
            self.context.check()

    def look(self, batch: Batch) -> Pair:
        """Forward of one microbatch alone, while `observing`; its loss as (sum, count), 0 where it is not."""
        if self.pipeline is not None:
            return self.pipeline.forward(batch)
        total, count = self.modules[0](batch)
        return total, count

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Around forwards without a backward: afterwards this rank holds again what it holds between two steps."""
        if self.tied is not None:
            self.tied.follow()
        with self._cut():
            yield
        for reduction in self.reductions:
            reduction.rest()

    @contextmanager
    def _cut(self) -> Iterator[None]:
        """While tensors are cut between tp ranks: the loss takes cut logits, and a plain tensor is whole on each rank.

        The latter only where no module is Heads: what comes out of one is plain, and differs from rank to rank.
        Raises SpecError for tensors that do not meet, by what the sharding table has to do with it; CheckFailed where a
        parameter is none that was cut.
        """
        if self.trail is None:
            yield
            return
        heads = any(isinstance(rule, Heads) for rule in self.joined.values())
        with loss_parallel(), nullcontext() if heads else implicit_replication(), held_back() as logged:
            try:
                yield
            except RuntimeError as error:
                fault = self.trail.fault(error)
                if fault is None:
                    raise
                logged.clear()  # told in our words
                plain = [name for name, p in self.network.named_parameters() if not isinstance(p, DTensor)]
                raise CheckFailed(replaced(plain)) if plain else fault from error

    def finish(self) -> None:
        """After the last backward: every gradient is the sum over all samples of the step, or CheckFailed.

        Collectives: over "tp", one all-reduce of the gradients of norms and biases that sequence parallel cuts; over
        "pp", those of `Tied`.
        """
        for reduction in self.reductions:
            reduction.finish()
        for module in self.modules:
            sum_partial(module)
        if self.tied is not None:
            self.tied.sum()


def parallelize(
    module: LossModule,
    layout: LayoutSpec,
    device: torch.device,
    precision: PrecisionSpec = PrecisionSpec(),  # noqa: B008  # frozen
    exact: bool = False,
) -> Parallel:
    """Spread `module`, on the CPU or the meta device, as the settled `layout` says.

    precision: in what parameters are gathered, and gradients summed over data-parallel ranks. exact: in one fixed
    order, whatever their number.

    The order is fixed: context parallel, tensor and sequence parallel, expert parallel, compilation, recompute,
    stages of a pipeline, sharded data parallel or replicas. The rules have refused what is not built yet.
    Collectives: those that make the mesh's groups, and of `data_parallel.Replicas`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    grid = Grid.of(layout)
    place = grid.coordinate(rank)
    network, kit = module.module, module.kit

    context = None
    if grid.cp > 1:
        context = ContextParallel(
            sub_mesh(grid, device.type, "cp"), layout.cp_method, layout.compile != "none"
        )
    joined: Mapping[str, Rule] = {}
    trail: Trail | None = None
    if grid.tp > 1:
        mesh = sub_mesh(grid, device.type, "tp")
        joined, trail = tensor_parallel(network, kit, mesh, layout.sp, whole_experts=grid.ep > 1)
    if grid.ep > 1:
        expert_parallel(network, sub_mesh(grid, device.type, "ep"))
    forget = trail.forget if trail else lambda: None
    compiled(network, kit, layout, forget)
    recompute(network, kit, layout, forget)
    stages = whole(module)
    if grid.pp > 1:
        stages = in_stages(module, layout, device, precision, is_sharded(layout, device))
    leaves = Leaves() if exact else None
    reductions = [spread(stage, layout, device, precision, leaves) for stage in stages.modules]
    pipeline = Pipeline(stages.index, reductions, kit, layout, device, precision) if grid.pp > 1 else None
    has_loss = pipeline is None or pipeline.is_last
    return Parallel(
        stages.modules,
        stages.network,
        grid,
        grid.degree("dp"),
        grid.index(rank, "dp"),
        has_loss and place["tp"] == 0,
        has_loss and place["tp"] == place["cp"] == 0,
        context,
        pipeline,
        stages.tied,
        tuple(reductions),
        GradientNorm(grid, rank, stages.tied)
        if leaves is None
        else partial(exact_norm, speaks=place["dp_replicate"] == 0),
        Balance(stages.network, stage_group(grid, device.type)),
        joined,
        trail,
        leaves,
    )


def spread(
    module: LossModule,
    layout: LayoutSpec,
    device: torch.device,
    precision: PrecisionSpec,
    leaves: Leaves | None = None,
) -> Alone | Replicas | Sharded:
    """Data parallel of one stage, or of the whole model: sharded, in copies, or neither.

    leaves: where gradients are added up in one order, each when it comes.
    """
    grid = Grid.of(layout)
    if is_sharded(layout, device):
        blocks = {name: module.module.get_submodule(name) for name in module.kit.blocks(module.module)}
        reduction = Sharded(module, [*blocks.values()], layout, device, precision, leaves)
        if layout.wrap != "model":
            EveryBlock(reduction.module, blocks)
        return reduction
    if grid.dp_replicate * grid.cp > 1:
        return replicas(moved(module, device), layout, device, precision, leaves)
    return Alone(moved(module, device), layout.unused_parameters, leaves)


def is_sharded(layout: LayoutSpec, device: torch.device) -> bool:
    """Whether FSDP2 will hold the model."""
    grid = Grid.of(layout)
    return (
        (layout.zero > 0 and grid.degree("fsdp") > 1)
        or (grid.dp_replicate * grid.cp > 1 and grid.tp * grid.pp > 1)
        or grid.ep > 1
        or home(layout, device) != device
    )


def is_cut(layout: LayoutSpec) -> bool:
    """Whether no rank will have every parameter whole, so that it can be built without values."""
    grid = Grid.of(layout)
    return grid.tp * grid.pp * grid.ep > 1 or (layout.zero > 0 and grid.degree("fsdp") > 1)
