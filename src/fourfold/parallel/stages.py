"""A network in stages of a pipeline: which parts of it this rank has.

Every part keeps the name that it has in the whole network; a stage has None in the place of what it lacks. A tied
parameter that the first and the last stage both use stands in both, by its first name: see `tied`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fourfold.models.exchange import Stacks
from fourfold.models.protocol import LossModule, ModelKit, StagedKit, StageModule
from fourfold.parallel.mesh import ends_group
from fourfold.parallel.narrow import rounded
from fourfold.parallel.tied import Tied, untie
from fourfold.plan.stages import block_costs, blocks_of_stages, cost_of
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.grid import Grid
from fourfold.spec.schedules import rank_of, stages_in_all, stages_of
from fourfold.spec.training import LayoutSpec, PrecisionSpec


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one rank.

    modules: in order; index: of each among all stages; network: all that they have, by the names of the whole one.
    tied: the parameters that the first and the last one share, if either is here.
    """

    modules: tuple[LossModule, ...]
    index: tuple[int, ...]
    network: nn.Module
    tied: Tied | None = None


def whole(module: LossModule) -> Stages:
    """A model in one piece."""
    return Stages((module,), (0,), module.module)


def in_stages(
    module: LossModule, layout: LayoutSpec, device: torch.device, precision: PrecisionSpec, held: bool
) -> Stages:
    """The stages that stand on this rank; their parameters are those of `module`. held: whether FSDP2 will hold them.

    Collectives: those that make the group of the first and the last rank, if they share a parameter.
    Raises SpecError for a model that cannot be cut.
    """
    network, kit, grid = module.module, module.kit, Grid.of(layout)
    cut = cut_of(network, kit, layout)
    assert isinstance(kit, StagedKit), "cut_of has refused others"
    index = stages_of(layout, grid.coordinate(dist.get_rank())["pp"])
    last = cut.stages - 1
    networks = [pruned(network, cut.keep[at], hooks=at == last) for at in index]
    union = pruned(network, [name for at in index for name in cut.keep[at]], hooks=False)
    tied: Tied | None = None
    if cut.tied:
        twice = {0, last} <= {*index}
        if twice:
            untie(networks[-1], union, cut.tied)
        group = None if rank_of(layout, last) == 0 else ends_group(grid, device.type)
        if 0 in index or last in index:
            twins = networks[-1] if twice else None
            tied = Tied(cut.tied, union, twins, group, 0 in index, layout.unused_parameters)
    modules = [
        rounded(StageModule(kit, one, at == last), precision, held)
        for one, at in zip(networks, index, strict=True)
    ]
    return Stages(tuple(modules), index, union, tied)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a network is cut. keep: of each stage the modules that it has, by name; tied: parameters of both ends."""

    keep: tuple[tuple[str, ...], ...]
    tied: tuple[str, ...]

    @property
    def stages(self) -> int:
        return len(self.keep)


def cut_of(network: nn.Module, kit: ModelKit, layout: LayoutSpec) -> Cut:
    """Which modules each stage has. network: whole, on any device. Collectives: none.

    Raises SpecError for a model that cannot run in parts, or has fewer blocks than there are stages.
    """
    if not isinstance(kit, StagedKit):
        raise SpecError(_no_parts(kit, layout))
    blocks = kit.blocks(network)
    stages = stages_in_all(layout)
    if len(blocks) < stages or (layout.pp_split is not None and sum(layout.pp_split) != len(blocks)):
        raise SpecError(_too_few(layout, len(blocks), stages))
    before, after = kit.ends(network)
    _check_ends(network, blocks, before, after)
    stacks = {name: module.each for name, module in network.named_modules() if isinstance(module, Stacks)}
    shapes = {
        name: (each, *p.shape[1:]) if (each := stacks.get(name.rpartition(".")[0])) else tuple(p.shape)
        for name, p in network.named_parameters(remove_duplicate=False)
    }
    last = cost_of(shape for name, shape in shapes.items() if _inside(name, after))
    keep = [
        [blocks[at] for at in span] for span in blocks_of_stages(layout, block_costs(blocks, shapes), last)
    ]
    tied = _tied(network, before, after)
    keep[0] = [*before, *keep[0]]
    keep[-1] += [*after, *(name.rpartition(".")[0] for name in tied)]
    return Cut(tuple(map(tuple, keep)), tuple(tied))


def pruned(network: nn.Module, keep: Iterable[str], hooks: bool) -> nn.Module:
    """`network` with those modules alone, by name, and what is in them; they are shared, what holds them is not.

    hooks: whether the network's own hooks stay: what they do to its output is for that of the last stage.
    """
    return _pruned(network, "", frozenset(keep), hooks)


def _pruned(module: nn.Module, name: str, keep: frozenset[str], hooks: bool) -> nn.Module:
    held = copy.copy(module)
    # What torch keeps by module, so that the copy is a module of its own.
    held.__dict__ = {
        key: value.copy() if isinstance(value, dict) else value for key, value in vars(module).items()
    }
    for child_name, child in module._modules.items():
        path = f"{name}.{child_name}".removeprefix(".")
        if child is None or path in keep:
            continue
        inside = any(kept.startswith(f"{path}.") for kept in keep)
        held._modules[child_name] = _pruned(child, path, keep, True) if inside else None
    if not hooks:
        held._forward_hooks = OrderedDict()
        held._forward_pre_hooks = OrderedDict()
    return held


def _inside(parameter: str, modules: Iterable[str]) -> bool:
    return any(parameter.startswith(f"{module}.") for module in modules)


def _tied(network: nn.Module, before: Sequence[str], after: Sequence[str]) -> list[str]:
    """First names of the parameters that both ends use."""
    first = {id(p): name for name, p in network.named_parameters()}
    every = network.named_parameters(remove_duplicate=False)
    return sorted(
        {first[id(p)] for name, p in every if _inside(name, after) and _inside(first[id(p)], before)}
    )


def _check_ends(
    network: nn.Module, blocks: Sequence[str], before: Sequence[str], after: Sequence[str]
) -> None:
    """Every parameter is in one block, or at one end. A tie between blocks would need them in one stage."""
    owners: dict[int, set[str]] = {}
    lost = []
    places = {**dict.fromkeys(before, "an end"), **dict.fromkeys(after, "an end"), **{b: b for b in blocks}}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        place = next((where for module, where in places.items() if name.startswith(f"{module}.")), None)
        if place is None:
            lost.append(name)
        else:
            owners.setdefault(id(parameter), set()).add(place)
    names = {id(p): name for name, p in network.named_parameters()}
    torn = [names[at] for at, where in owners.items() if len(where) > 1]
    if lost:
        raise SpecError(
            Problem(
                asked="a network cut into stages between its blocks",
                found=f"{', '.join(lost[:5])} in no block, and in none of the modules that ends() names",
                why="no stage would have it",
                instead="name its module in blocks(), or in ends() before the first or after the last block",
            )
        )
    if torn:
        raise SpecError(
            Problem(
                asked="a network cut into stages between its blocks",
                found=f"{', '.join(torn[:5])} shared by several blocks",
                why="they may be in several stages; only what runs before the first block may be shared with what runs "
                "after the last",
                instead="--set layout.pp=1",
            )
        )


def _no_parts(kit: ModelKit, layout: LayoutSpec) -> Problem:
    lacking = [name for name in ("ends", "stream", "part") if not callable(getattr(kit, name, None))]
    return Problem(
        asked=f"layout.pp = {layout.pp} with this model",
        found=f"a model without {', '.join(f'{name}()' for name in lacking)}",
        why="a stage runs some blocks of the network: how, only the model can say",
        instead="those methods beside loss() (docs/own_model.md, stages), or --set layout.pp=1",
    )


def _too_few(layout: LayoutSpec, blocks: int, stages: int) -> Problem:
    return Problem(
        asked=f"layout.pp = {layout.pp} in {stages} stages",
        found=f"a model of {blocks} blocks"
        + (f", and layout.pp_split of {sum(layout.pp_split)}" if layout.pp_split else ""),
        why="every stage holds at least one block, and every block is in one stage",
        instead=f"--set layout.pp={max(1, min(layout.pp, blocks))}",
    )
