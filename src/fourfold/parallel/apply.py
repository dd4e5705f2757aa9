"""How a model is spread over ranks: a page of calls, in the order in which they must happen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from fourfold.data.batch import Batch
from fourfold.models.protocol import Heads, LossModule, Rule
from fourfold.parallel.clip import GradientNorm
from fourfold.parallel.context_parallel import ContextParallel
from fourfold.parallel.data_parallel import Alone, Replicas, moved
from fourfold.parallel.every_block import EveryBlock
from fourfold.parallel.mesh import sub_mesh
from fourfold.parallel.offload import home
from fourfold.parallel.rehearsed_replicas import replicas
from fourfold.parallel.sharded import Sharded, replaced
from fourfold.parallel.tensor_parallel import sum_partial, tensor_parallel
from fourfold.parallel.trail import Trail, held_back
from fourfold.spec.errors import CheckFailed
from fourfold.spec.grid import Grid
from fourfold.spec.training import LayoutSpec, PrecisionSpec


@dataclass(frozen=True, slots=True)
class Parallel:
    """A model spread over ranks.

    module: called like the bare loss module. degree: over how many ranks the global batch is cut; dp_rank: which cut.
    counts: whether this rank speaks for its targets, where several compute the same ones. speaks: for its samples.
    joined: under tensor parallel each module that has parameters, by name, with its rule; else empty. trail: of those.
    """

    module: nn.Module
    network: nn.Module
    grid: Grid
    degree: int
    dp_rank: int
    counts: bool
    speaks: bool
    context: ContextParallel | None
    reduction: Alone | Replicas | Sharded
    norm: GradientNorm
    joined: Mapping[str, Rule]
    trail: Trail | None

    @property
    def loss_factor(self) -> int:
        """What the loss is multiplied with before backward, so that gradients are summed over ranks."""
        return self.degree * self.grid.cp if isinstance(self.reduction, Replicas) else 1

    @property
    def share(self) -> int:
        """Which part of a global batch this rank computes: of its samples, and of their tokens."""
        return self.dp_rank * self.grid.cp + (0 if self.context is None else self.context.rank)

    def own(self, batch: Batch) -> Batch:
        """What this rank computes of a microbatch of its samples: all of it, or some tokens of each row."""
        return batch if self.context is None else self.context.own(batch)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one microbatch of a step."""
        with self.reduction.microbatch(last), self._cut():
            yield
        if self.context is not None:
            self.context.check()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Around forwards without a backward: afterwards this rank holds again what it holds between two steps."""
        with self._cut():
            yield
        self.reduction.rest()

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

        Collectives: over "tp", one all-reduce of the gradients of norms and biases that sequence parallel cuts.
        """
        self.reduction.finish()
        sum_partial(self.network)


def parallelize(
    module: LossModule,
    layout: LayoutSpec,
    device: torch.device,
    precision: PrecisionSpec = PrecisionSpec(),  # noqa: B008  # frozen
) -> Parallel:
    """Spread `module`, on the CPU or the meta device, as the settled `layout` says.

    precision: in what parameters are gathered, and gradients summed over data-parallel ranks.

    The order is fixed: tensor and sequence parallel, context parallel, expert parallel, recompute, sharded data
    parallel, replicas, pipeline. The rules have refused what is not built yet.
    Collectives: those that make the mesh's groups, and of `data_parallel.Replicas`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    grid = Grid.of(layout)
    place = grid.coordinate(rank)
    network, kit = module.module, module.kit

    context = None
    if grid.cp > 1:
        context = ContextParallel(sub_mesh(grid, device.type, "cp"), layout.cp_method)
    joined: Mapping[str, Rule] = {}
    trail: Trail | None = None
    if grid.tp > 1:
        joined, trail = tensor_parallel(network, kit, sub_mesh(grid, device.type, "tp"), layout.sp)
    reduction: Alone | Replicas | Sharded
    if is_sharded(layout, device):
        blocks = {name: network.get_submodule(name) for name in kit.blocks(network)}
        reduction = Sharded(module, [*blocks.values()], layout, device, precision)
        if layout.wrap != "model":
            EveryBlock(reduction.module, blocks)
    elif grid.dp_replicate * grid.cp > 1:
        reduction = replicas(moved(module, device), layout, device, precision)
    else:
        reduction = Alone(moved(module, device), layout.unused_parameters)
    counts = all(place[axis] == 0 for axis in ("pp", "tp"))
    return Parallel(
        reduction.module,
        network,
        grid,
        grid.degree("dp"),
        grid.index(rank, "dp"),
        counts,
        counts and place["cp"] == 0,
        context,
        reduction,
        GradientNorm(grid, rank),
        joined,
        trail,
    )


def is_sharded(layout: LayoutSpec, device: torch.device) -> bool:
    """Whether FSDP2 will hold the model."""
    grid = Grid.of(layout)
    return (
        (layout.zero > 0 and grid.degree("fsdp") > 1)
        or (grid.dp_replicate * grid.cp > 1 and grid.tp > 1)
        or home(layout, device) != device
    )


def is_cut(layout: LayoutSpec) -> bool:
    """Whether every parameter will be a DTensor, so that it can be built without values."""
    grid = Grid.of(layout)
    return grid.tp > 1 or (layout.zero > 0 and grid.degree("fsdp") > 1)
