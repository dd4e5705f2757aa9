"""Parameters that the first and the last stage of a pipeline share: one gradient, and one value."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fourfold.collectives.rehearsed import with_values
from fourfold.parallel.clip import local
from fourfold.spec.errors import Problem, SpecError


class Tied:
    """They are looked up by name: what spreads a stage puts others in their places.

    Both ends update what they hold by the same gradient, so that they stay equal.
    """

    def __init__(
        self,
        names: Sequence[str],
        network: nn.Module,
        twins: nn.Module | None,
        group: dist.ProcessGroup | None,
        first: bool,
        may_be_unused: bool = False,
    ) -> None:
        """network: what this rank has of the model; twins: its last stage, if the first is here too and comes first.

        group: of the ranks of both ends, if they are two. first: whether the first stage is here.
        may_be_unused: whether an end may have no gradient in a step where the other has one.
        """
        self._names, self._network, self._twins, self._group, self._first = (
            names,
            network,
            twins,
            group,
            first,
        )
        self._may_be_unused = may_be_unused

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, by the first of their names."""
        return tuple(self._names)

    @property
    def owners(self) -> tuple[str, ...]:
        """The modules of the beginning that the last stage has for their parameters alone."""
        return tuple(name.rpartition(".")[0] for name in self._names)

    def elsewhere(self) -> list[nn.Parameter]:
        """Those that the first stage has on another rank."""
        return [] if self._first else [self._network.get_parameter(name) for name in self._names]

    @torch.no_grad()
    def sum(self) -> None:
        """After the reductions: the gradient is the sum of both ends'; none only where neither has one.

        Collectives: one all-reduce for each of them between the first and the last rank of "pp", where they are two,
        and one of a number before it if parameters may be unused.
        """
        for name in self._names:
            own = self._network.get_parameter(name)
            if self._twins is not None:
                twin = self._twins.get_parameter(name)
                if own.grad is None:
                    own.grad = twin.grad
                elif twin.grad is not None:
                    local(own.grad).add_(local(twin.grad))
                twin.grad = None
            elif self._group is not None and self._used(own):
                if own.grad is None:
                    own.grad = torch.zeros_like(own)
                dist.all_reduce(local(own.grad), group=self._group)

    def _used(self, parameter: nn.Parameter) -> bool:
        """Whether either end has a gradient: the same on both, or one would wait for the other."""
        used = parameter.grad is not None
        if not self._may_be_unused or not parameter.requires_grad:
            return used
        with with_values():
            mask = torch.tensor(int(used))
            dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._group)
            return bool(mask.item())

    @torch.no_grad()
    def follow(self) -> None:
        """Before a forward: a last stage beside the first has what the optimizer made of that. Collectives: none."""
        if self._twins is not None:
            for name in self._names:
                local(self._twins.get_parameter(name)).copy_(local(self._network.get_parameter(name)))


def untie(last: nn.Module, network: nn.Module, names: Iterable[str]) -> None:
    """Give the last stage, beside the first on one rank, parameters of its own under `names`.

    last: the stage's network, in which modules that have them are replaced by copies; network: of both stages, in which
    only the first one's stay. Raises SpecError for a module of the last stage that has other parameters beside them.
    """
    for name in names:
        shared = last.get_parameter(name)
        twin = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
        for path, key in _places(last, shared):
            parent, _, child = path.rpartition(".")
            module = copy.copy(last.get_submodule(path))
            module._parameters = {**module._parameters, key: twin}
            last.get_submodule(parent)._modules[child] = module
            if f"{path}.{key}" != name:
                if any(held is not None and held is not twin for held in module._parameters.values()):
                    raise SpecError(_beside(path, name))
                network.get_submodule(parent)._modules[child] = None


def _beside(module: str, name: str) -> Problem:
    return Problem(
        asked=f"the first and the last stage on one rank, with {name} tied to a parameter of {module}",
        found=f"{module} has other parameters, too",
        why="each stage is to have the tied one for itself, and none of the others twice",
        instead="--set 'layout.pp_schedule=\"interleaved-1f1b\"', whose last stage is on another rank",
    )


def _places(network: nn.Module, parameter: nn.Parameter) -> list[tuple[str, str]]:
    return [
        (path, key)
        for path, module in network.named_modules()
        for key, held in module._parameters.items()
        if held is parameter
    ]
