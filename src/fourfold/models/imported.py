"""A user's own model, by `model.target = "package.module:factory"`; docs/own_model.md is its page.

The factory is called with `model.args` and returns either a kit (`fourfold.models.protocol.ModelKit`) or, for data
parallel alone, simply an nn.Module whose forward takes the batch and returns (sum, count).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fourfold.models.factory import as_kit, call, check_arguments, described, failed, find, wrong
from fourfold.models.protocol import BatchLike, BoxedKit, ModelKit, Rule, StagedKit, Start, parameter_rules
from fourfold.spec.errors import FourfoldError
from fourfold.spec.model import ImportSpec


class ImportedKit:
    """A user's model as a `ModelKit`, with what it hands over checked."""

    def __init__(self, target: str, kit: ModelKit) -> None:
        self._target = target
        self._kit = kit

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        """See `ModelKit.build`; raises SpecError unless it is a module in `dtype` that can be trained and spread."""
        return self._checked("build", partial(self._kit.build, seed, dtype), dtype)

    def _checked(self, method: str, make: Callable[[], object], dtype: torch.dtype) -> nn.Module:
        """The network that a method of the user's makes."""
        try:
            module = make()
        except FourfoldError:
            raise
        except Exception as error:
            raise failed(self._target, error, "building the network fails") from error
        if not isinstance(module, nn.Module):
            raise wrong(
                self._target,
                found=f"{method}() returned {described(module)}",
                why="it must return the network",
                instead="return module.to(dtype)",
            )
        self._check_parameters(module)
        others = [n for n, p in module.named_parameters() if p.is_floating_point() and p.dtype != dtype]
        if others:
            raise wrong(
                self._target,
                found=f"{method}() made {', '.join(others)} in another dtype than {dtype}",
                why="the run and its proof choose the dtype of all parameters",
                instead="return module.to(dtype)",
            )
        parameter_rules(self, module)
        return module

    def _check_parameters(self, module: nn.Module) -> None:
        """There are parameters to train, and each has its shape already."""
        lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
        if lazy:
            raise wrong(
                self._target,
                found=f"{', '.join(lazy)} without a shape",
                why="ranks compare their parameters before the first batch, so none may wait for it",
                instead="nn.Linear(inputs, outputs) in place of nn.LazyLinear(outputs), and so on",
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise wrong(
                self._target,
                found="no parameter with requires_grad = True",
                why="there is nothing to train",
                instead="leave requires_grad on for what is to be trained",
            )

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        """See `ModelKit.loss`; raises SpecError unless it is a pair of scalar tensors."""
        return self._pair(self._kit.loss(module, batch))

    def _pair(self, pair: object) -> tuple[Tensor, Tensor]:
        if (
            isinstance(pair, tuple)
            and len(pair) == 2
            and all(isinstance(part, Tensor) and part.dim() == 0 for part in pair)
        ):
            if torch.is_grad_enabled() and not pair[0].requires_grad:
                raise wrong(
                    self._target,
                    found="a loss without a gradient",
                    why="it does not depend on any parameter that is trained: it was detached, or read as a number",
                    instead="return the sum as the network computed it, without detach(), item() or no_grad()",
                )
            return pair
        raise wrong(
            self._target,
            found=f"the loss is {described(pair)}",
            why="it must be (sum over valid targets, count of valid targets), two scalar tensors",
            instead="return loss_of_each_target[batch.valid].sum(), batch.valid.sum()",
        )

    def sharding(self) -> dict[str, Rule]:
        """See `ModelKit.sharding`; raises SpecError for what is no table."""
        try:
            table: object = self._kit.sharding()
        except Exception as error:
            raise failed(self._target, error, "making the sharding table fails") from error
        if not isinstance(table, dict):
            raise wrong(
                self._target,
                found=f"sharding() returned {described(table)}",
                why="it must be a table of patterns of parameter names and their rules",
                instead='return {"*": "replicate"}',
            )
        return table

    def blocks(self, module: nn.Module) -> tuple[str, ...]:
        """See `ModelKit.blocks`; raises SpecError unless they are names of modules, none of them inside another."""
        return self._names(module, "blocks()", self._given("blocks()", lambda: self._kit.blocks(module)))

    def _given(self, method: str, ask: Callable[[], object]) -> object:
        """What a method of the user's says."""
        try:
            return ask()
        except FourfoldError:
            raise
        except Exception as error:
            raise failed(self._target, error, f"{method} fails") from error

    def _names(self, module: nn.Module, method: str, given: object) -> tuple[str, ...]:
        """`given` as names of submodules; in a part of a network it may name some that are in other parts."""
        if not isinstance(given, tuple | list) or not all(isinstance(name, str) for name in given):
            raise wrong(
                self._target,
                found=f"{method} gives {described(given)}",
                why="it must give names of modules, each a text",
                instead=f"return {tuple(name for name, _ in module.named_children())}, or those that are meant",
            )
        places = set(_places(module))
        strange = [name for name in given if name not in places]
        if strange:
            raise wrong(
                self._target,
                found=f"{method} names {', '.join(strange)}",
                why="the network has no such module: its parameters would be in no unit, and in no stage",
                instead=", ".join(f'"{name}"' for name, _ in module.named_children()),
            )
        twice = [b for at, a in enumerate(given) for b in given[at + 1 :] if _overlap(a, b)]
        if twice:
            raise wrong(
                self._target,
                found=f"{method} names {', '.join(twice)} that is named already, or inside another that is",
                why="a parameter is in one unit, and in one stage",
                instead="each module once, and not what is in it or around it",
            )
        return tuple(given)


class BoxedImportedKit(ImportedKit):
    """One that can be made in parts, too (`BoxedKit`)."""

    _kit: BoxedKit

    def skeleton(self, dtype: torch.dtype) -> nn.Module:
        """See `BoxedKit.skeleton`; raises SpecError as `build` does, and for values that are not there."""
        module = self._checked("skeleton", partial(self._kit.skeleton, dtype), dtype)
        real = [name for name, p in module.named_parameters() if not p.is_meta]
        empty = [name for name, buffer in module.named_buffers() if buffer.is_meta]
        if real:
            raise wrong(
                self._target,
                found=f"skeleton() made {', '.join(real)} with memory",
                why="each rank makes its own part of the parameters, and start(name) says their values",
                instead='with torch.device("meta"): in skeleton(), around the network',
            )
        if empty:
            raise wrong(
                self._target,
                found=f"skeleton() made the buffers {', '.join(empty)} without values",
                why="buffers are whole on every rank, and start(name) is asked for parameters only",
                instead="after the network is made there: module.register_buffer(name, its value on the CPU)",
            )
        return module

    def start(self, name: str) -> Start:
        """See `BoxedKit.start`; raises SpecError unless it is a pair of numbers."""
        try:
            mean, std = self._kit.start(name)
            return Start(float(mean), float(std))
        except Exception as error:
            raise failed(self._target, error, f'start("{name}") must give (mean, std)') from error


class StagedImportedKit(ImportedKit):
    """One that can run in parts (`StagedKit`)."""

    _kit: StagedKit

    def ends(self, module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `StagedKit.ends`; raises SpecError unless they are names of modules that are in no block."""
        given = self._given("ends()", lambda: self._kit.ends(module))
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise wrong(
                self._target,
                found=f"ends() gives {described(given)}",
                why="it must give two tuples of names: what runs before the first block, and after the last one",
                instead='return ("embedding",), ("norm", "head")',
            )
        before, after = (self._names(module, "ends()", end) for end in given)
        self._names(module, "ends(), with blocks(),", (*self.blocks(module), *before, *after))
        return before, after

    def stream(self, batch: BatchLike) -> tuple[int, ...]:
        """See `StagedKit.stream`; raises SpecError unless it is a shape."""
        given = self._given("stream()", lambda: self._kit.stream(batch))
        if isinstance(given, tuple | list) and all(isinstance(size, int) and size > 0 for size in given):
            return tuple(given)
        raise wrong(
            self._target,
            found=f"stream() gives {described(given)}",
            why="it must give the shape of what goes from block to block: whole numbers above 0",
            instead="return (*batch.inputs.shape, features)",
        )

    def part(
        self, module: nn.Module, batch: BatchLike, stream: Tensor | None, last: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `StagedKit.part`; raises SpecError for a last part that is no loss, and for another that is no tensor."""
        given: object = self._kit.part(module, batch, stream, last)
        if last:
            return self._pair(given)
        if isinstance(given, Tensor):
            return given
        raise wrong(
            self._target,
            found=f"part() of a stage that is not the last gives {described(given)}",
            why="the next stage takes one tensor: the stream",
            instead="return the stream, as the last block that is here gives it",
        )


class BoxedStagedImportedKit(StagedImportedKit, BoxedImportedKit):
    """Both."""

    _kit: Any


def imported_kit(spec: ImportSpec) -> ImportedKit:
    """The kit of `spec.target`: a `BoxedKit`, a `StagedKit`, or both, where the factory gives one with their methods.

    Raises SpecError where the target cannot be imported, does not take `model.args`, or returns no model.
    """
    factory = find(spec.target)
    check_arguments(spec.target, factory, spec.args)
    made = call(spec.target, factory, spec.args)
    kit = _ModuleKit(factory, spec.args) if isinstance(made, nn.Module) else as_kit(spec.target, made)
    boxed, staged = isinstance(kit, BoxedKit), isinstance(kit, StagedKit)
    if staged:
        return (BoxedStagedImportedKit if boxed else StagedImportedKit)(spec.target, kit)
    return (BoxedImportedKit if boxed else ImportedKit)(spec.target, kit)


class _ModuleKit:
    """A plain nn.Module as a kit: built under its seed, whole on every rank, without blocks."""

    def __init__(self, factory: Callable[..., Any], args: dict[str, Any]) -> None:
        self._factory = factory
        self._args = args

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module: nn.Module = self._factory(**self._args)
        return module.to(dtype)

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], module(batch))

    def sharding(self) -> dict[str, Rule]:
        return {"*": "replicate"}

    def blocks(self, module: nn.Module) -> tuple[str, ...]:  # noqa: ARG002
        return ()


def _places(module: nn.Module) -> Iterator[str]:
    """Names of all submodules, of those that are in another part of the network, too."""
    for path, held in module.named_modules():
        yield path
        yield from (
            f"{path}.{child}".removeprefix(".") for child, value in held._modules.items() if value is None
        )


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
