"""Data parallel with a sharded state (ZeRO, Rajbhandari et al., arXiv 1910.02054), and replicas beside other axes.

By torch's FSDP2 (`fully_shard`), in units of `layout.wrap` blocks each; what is outside the blocks is one unit more.

  stage 1   moments are sharded: gradients are reduce-scattered once a step, parameters stay whole until its end
  stage 2   gradients too: reduce-scattered after each microbatch
  stage 3   parameters too: gathered for each forward and backward of a unit, and dropped after it
  stage 0   nothing: `replicate`, the same machinery with one all-reduce of gradients once a step

Collectives on "fsdp", which is dp_shard × cp (and an all-reduce of the shards on "dp_replicate", once a step): those
all-gathers and reductions, started ahead so that they overlap with computation; in each step one more, small, where
`layout.unused_parameters` is set. Under expert parallel experts are units of their own, on "efsdp" and "edp_replicate"
in place of these. Gradients are summed, not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

from fourfold.models.boxes import cut_dim
from fourfold.models.exchange import Stacks
from fourfold.parallel.clip import local
from fourfold.parallel.in_order import ReduceScatterInOrder
from fourfold.parallel.leaves import Leaves
from fourfold.parallel.mesh import stage_group, sub_mesh
from fourfold.parallel.narrow import NarrowReduceScatter, policy
from fourfold.parallel.offload import offload_policy
from fourfold.parallel.took_part import TookPart
from fourfold.spec.boxes import stack_dim
from fourfold.spec.errors import CheckFailed, Problem, SpecError
from fourfold.spec.grid import Grid
from fourfold.spec.rules_memory import beyond_units
from fourfold.spec.schedules import SCHEDULES
from fourfold.spec.training import LayoutSpec, PrecisionSpec


class _Asked(NamedTuple):
    """What FSDP2 does in a backward: reduce gradients, all-reduce them between replicas, drop gathered parameters."""

    sync: bool
    all_reduce: bool
    drop: bool


class Sharded:
    """A network under FSDP2, as a stage of ZeRO."""

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        layout: LayoutSpec,
        device: torch.device,
        precision: PrecisionSpec,
        leaves: Leaves | None = None,
    ) -> None:
        """Wrap `module`, its `blocks` first, in place. Parameters may be on the meta device.

        leaves: where gradients of microbatches are added up in one order; they are whole then until the last one, and
        what is said of stages 2 and 3 holds for the rest.

        Raises SpecError where one unit would have more blocks, or more units are gathered ahead, than there are.
        """
        self.module = module
        self._stage = layout.zero
        self._leaves = leaves
        self._unused = layout.unused_parameters
        grid = Grid.of(layout)
        self._took_part = TookPart(module, stage_group(grid, device.type))
        self._names = {child: name.removeprefix("module.") for name, child in module.named_modules()}
        self._offload = offload_policy(layout, device)
        self._precision = policy(precision)
        self._stacks = {
            id(parameter)
            for stack in module.modules()
            if isinstance(stack, Stacks)
            for parameter in stack.parameters()
        }
        self._replicas = grid.dp_replicate > 1 and leaves is None  # else its sum is that of the shards' own
        self._splits = layout.pp > 1 and SCHEDULES[layout.pp_schedule].splits
        self._asked: _Asked | None = None
        self._begun = False  # a step, by its first microbatch
        units = in_units(blocks, layout)
        beyond = beyond_units(layout, len(units))
        if beyond is not None:
            raise SpecError(beyond)
        if grid.ep > 1:
            for stack in [child for child in module.modules() if isinstance(child, Stacks)]:
                self._wrap(stack, grid, device, "edp", ("edp_replicate", "efsdp"))
        for unit in units:
            self._wrap(unit if len(unit) > 1 else unit[0], grid, device)
        self._wrap(module, grid, device)
        self._units = [child for child in module.modules() if isinstance(child, FSDPModule)]
        # FSDP2's groups of parameters: one for each unit, and none for one that has no parameters
        found = {id(g): g for unit in self._units for g in unit._get_fsdp_state()._fsdp_param_groups}
        self.groups: tuple[FSDPParamGroup, ...] = tuple(found.values())
        for wrapped in self._units:
            wrapped.set_gradient_divide_factor(1.0)
            wrapped.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            wrapped.set_reduce_scatter_unused_params(True)
            if leaves is not None:
                copies = (
                    sub_mesh(grid, device.type, "dp_replicate").get_group() if grid.dp_replicate > 1 else None
                )
                wrapped.set_custom_reduce_scatter(ReduceScatterInOrder(copies))
            elif precision.reduce == "bf16":
                wrapped.set_custom_reduce_scatter(NarrowReduceScatter())
        if leaves is not None:
            for group in self.groups:
                take_turns(group, leaves)
        if layout.prefetch:
            _gather_ahead([module, *(unit[0] for unit in units)], layout.prefetch)

    def _wrap(
        self,
        unit: nn.Module | list[nn.Module],
        grid: Grid,
        device: torch.device,
        copies: str = "copies",
        both: tuple[str, str] = ("dp_replicate", "fsdp"),
    ) -> None:
        """copies: ranks that hold the same where nothing is sharded; both: replicas, and ranks to shard over."""
        if self._stage == 0:
            mesh = sub_mesh(grid, device.type, copies)
            replicate(unit, mesh=mesh, mp_policy=self._precision)
            return
        axes = both if self._replicas else both[1:]
        fully_shard(
            unit,
            mesh=sub_mesh(grid, device.type, *axes),
            shard_placement_fn=partial(self._placement, grid.degree(both[1])),
            # torch's default keeps the root gathered, for backward begins with it, and drops every other unit
            reshard_after_forward=None if self._stage == 3 else False,
            offload_policy=self._offload,
            mp_policy=self._precision,
        )

    def _placement(self, shards: int, parameter: nn.Parameter) -> Shard | None:
        """Over which dim a parameter is cut; None: over its rows."""
        if id(parameter) not in self._stacks:
            return None
        cut = None
        if isinstance(parameter, DTensor):
            cut = next((dim for place in parameter.placements if (dim := cut_dim(place)) is not None), None)
        return Shard(stack_dim(local(parameter).shape, cut, shards))

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward: what is reduced, and what stays gathered, until the last.

        Where backwards are split nothing is reduced or dropped before `reduce_split`: FSDP2's hooks are of the first
        half.
        """
        root = self.module
        assert isinstance(root, FSDPModule), "it was wrapped last"
        if not self._begun:
            self._check_own()
            self._begun = True
        last = last and not self._splits
        if self._leaves is not None:
            self._leaves.next()
        asked = _Asked(
            sync=last or (self._stage >= 2 and self._leaves is None),
            all_reduce=last or not self._replicas,
            drop=last or (self._stage not in (1, 2) and not self._splits),
        )
        if asked != self._asked:  # each of these walks over all modules
            root.set_requires_gradient_sync(asked.sync)
            root.set_requires_all_reduce(asked.all_reduce)
            if self._stage in (1, 2) or self._splits:
                root.set_reshard_after_backward(asked.drop)
            self._asked = asked
        root.set_is_last_backward(last)
        yield

    def reduce_split(self) -> None:
        """After backwards in two halves, which FSDP2's own hooks take for whole ones: reduce what has been added up.

        As torch's pipelining does it (PipelineStage.perform_reduce_grad).
        """
        root = self.module
        assert isinstance(root, FSDPModule), "it was wrapped last"
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        root.set_requires_all_reduce(True)
        self._asked = None
        for group in self.groups:
            group.post_backward()
        root._get_fsdp_state()._root_post_backward_final_callback()

    def rest(self) -> None:
        """Drop what was gathered; a forward without a backward leaves it, and stages 1 and 2 hold it until then."""
        for unit in self._units:
            unit.reshard()

    def finish(self) -> None:
        """After the last backward: drop the zeros of what took part on no rank."""
        self._begun = False
        self._took_part.settle(self.module, self._unused)

    def _check_own(self) -> None:
        """FSDP2 gathers what it was given, and would put it back in place of what has taken its place since."""
        strangers = [
            f"{self._names[module]}.{key}"
            for group in self.groups
            if group.is_sharded
            for own in group.fsdp_params
            for module, key in places(own)
            if module._parameters[key] is not own.sharded_param
            or own.sharded_param.requires_grad != self._took_part.trained(module, key)
        ]
        if strangers:
            raise CheckFailed(replaced(strangers))


def take_turns(group: FSDPParamGroup, leaves: Leaves) -> None:
    """Before FSDP2 sees to the gradients of a unit, they take their turns; in the step's last one it gets the sums."""
    see_to = group.post_backward

    @torch.no_grad()
    def post_backward(*unused: Any) -> None:
        for own in group.fsdp_params:
            whole: Any = getattr(own, "_unsharded_param", None)
            if whole is None or not own.sharded_param.requires_grad:
                continue  # it was never gathered, or is frozen
            gradient, whole.grad = whole.grad, None
            if gradient is not None or not leaves.came(id(own)):  # FSDP2 may come again, with nothing new
                wide = None if gradient is None else gradient.to(own.sharded_param.dtype)
                own.unsharded_accumulated_grad = leaves.take(id(own), wide)
        see_to(*unused)

    group.post_backward = post_backward  # type: ignore[method-assign]


def places(own: FSDPParam) -> list[tuple[nn.Module, str]]:
    """Where a parameter of FSDP2's stands: in several places if it is tied."""
    at = own._module_info
    return [(at.module, at.param_name), *zip(at.shared_modules, at.shared_param_names, strict=True)]


def in_units(blocks: Sequence[nn.Module], layout: LayoutSpec) -> list[list[nn.Module]]:
    """`blocks` by unit of sharding, in order; the last may have fewer. Raises SpecError where a unit has too many."""
    wrap = layout.wrap
    if wrap == "model":
        return []
    if wrap > max(len(blocks), 1):
        raise SpecError(
            Problem(
                asked=f"layout.wrap = {wrap} with a model of {len(blocks)} blocks",
                found="fewer blocks than one unit would have",
                why="a unit has at most all blocks that the model's blocks() names",
                instead=f"--set layout.wrap={len(blocks)} or --set layout.wrap=model"
                if blocks
                else "--set layout.wrap=model",
            )
        )
    return [[*blocks[at : at + wrap]] for at in range(0, len(blocks), wrap)]


def _gather_ahead(units: Sequence[nn.Module], ahead: int) -> None:
    """While a unit computes, the next `ahead` are gathered; in backward, those before it. units: the root first.

    FSDP2 by itself gathers one ahead, in backward; in forward that of the next one begins when its turn comes.
    """
    wrapped: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    root, *blocks = wrapped
    for at, unit in enumerate(wrapped):
        unit.set_modules_to_forward_prefetch(wrapped[at + 1 : at + 1 + ahead])
    root.set_modules_to_backward_prefetch(blocks[::-1][:ahead])
    for at, unit in enumerate(blocks):
        unit.set_modules_to_backward_prefetch(blocks[:at][::-1][:ahead])


def replaced(names: Sequence[str]) -> Problem:
    """Parameters that are not those which the optimizer, or FSDP2, was given."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return Problem(
        asked="an update of the parameters that the model computes with",
        found=f"{', '.join(names[:5])}{more} {'was' if len(names) == 1 else 'were'} "
        "replaced, moved, frozen or thawed after the optimizer was built, or gathered by a forward before",
        why="the optimizer would go on updating what is no longer part of the model: nothing would train",
        instead="change values in place (parameter.copy_); replace, freeze and thaw while the model is built; "
        "no forward before the optimizer",
    )
