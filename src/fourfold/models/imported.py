"""A user's own model, by `model.target = "package.module:factory"`; docs/own_model.md is its page.

The factory is called with `model.args` and returns either a kit (`fourfold.models.protocol.ModelKit`) or, for data
parallel alone, simply an nn.Module whose forward takes the batch and returns (sum, count).
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fourfold.models.protocol import BatchLike, BoxedKit, ModelKit, Rule, StagedKit, Start, parameter_rules
from fourfold.spec.errors import FourfoldError, Problem, SpecError
from fourfold.spec.model import ImportSpec
from fourfold.spec.target import look_here_first

_METHODS = ("build", "loss", "sharding", "blocks")


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
            raise _failed(self._target, error, "building the network fails") from error
        if not isinstance(module, nn.Module):
            raise _error(
                self._target,
                found=f"{method}() returned {_described(module)}",
                why="it must return the network",
                instead="return module.to(dtype)",
            )
        self._check_parameters(module)
        others = [n for n, p in module.named_parameters() if p.is_floating_point() and p.dtype != dtype]
        if others:
            raise _error(
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
            raise _error(
                self._target,
                found=f"{', '.join(lazy)} without a shape",
                why="ranks compare their parameters before the first batch, so none may wait for it",
                instead="nn.Linear(inputs, outputs) in place of nn.LazyLinear(outputs), and so on",
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise _error(
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
                raise _error(
                    self._target,
                    found="a loss without a gradient",
                    why="it does not depend on any parameter that is trained: it was detached, or read as a number",
                    instead="return the sum as the network computed it, without detach(), item() or no_grad()",
                )
            return pair
        raise _error(
            self._target,
            found=f"the loss is {_described(pair)}",
            why="it must be (sum over valid targets, count of valid targets), two scalar tensors",
            instead="return loss_of_each_target[batch.valid].sum(), batch.valid.sum()",
        )

    def sharding(self) -> dict[str, Rule]:
        """See `ModelKit.sharding`; raises SpecError for what is no table."""
        try:
            table: object = self._kit.sharding()
        except Exception as error:
            raise _failed(self._target, error, "making the sharding table fails") from error
        if not isinstance(table, dict):
            raise _error(
                self._target,
                found=f"sharding() returned {_described(table)}",
                why="it must be a table of patterns of parameter names and their rules",
                instead='return {"*": "replicate"}',
            )
        return table

    def blocks(self, module: nn.Module) -> tuple[str, ...]:
        """See `ModelKit.blocks`."""
        return self._kit.blocks(module)


class BoxedImportedKit(ImportedKit):
    """One that can be made in parts, too (`BoxedKit`)."""

    _kit: BoxedKit

    def skeleton(self, dtype: torch.dtype) -> nn.Module:
        """See `BoxedKit.skeleton`; raises SpecError as `build` does, and for values that are not there."""
        module = self._checked("skeleton", partial(self._kit.skeleton, dtype), dtype)
        real = [name for name, p in module.named_parameters() if not p.is_meta]
        empty = [name for name, buffer in module.named_buffers() if buffer.is_meta]
        if real:
            raise _error(
                self._target,
                found=f"skeleton() made {', '.join(real)} with memory",
                why="each rank makes its own part of the parameters, and start(name) says their values",
                instead='with torch.device("meta"): in skeleton(), around the network',
            )
        if empty:
            raise _error(
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
            raise _failed(self._target, error, f'start("{name}") must give (mean, std)') from error


class StagedImportedKit(ImportedKit):
    """One that can run in parts (`StagedKit`)."""

    _kit: StagedKit

    def ends(self, module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `StagedKit.ends`; raises SpecError unless they are names of modules."""
        try:
            before, after = self._kit.ends(module)
            names = {name for name, _ in module.named_modules()}
            strange = [name for name in (*before, *after) if name not in names]
        except Exception as error:
            raise _failed(self._target, error, "ends() must give two tuples of names of modules") from error
        if strange:
            raise _error(
                self._target,
                found=f"ends() names {', '.join(map(str, strange))}",
                why="the network has no such module: its parameters would be in no stage",
                instead=", ".join(f'"{name}"' for name, _ in module.named_children()),
            )
        return tuple(before), tuple(after)

    def stream(self, batch: BatchLike) -> tuple[int, ...]:
        """See `StagedKit.stream`."""
        return tuple(self._kit.stream(batch))

    def part(
        self, module: nn.Module, batch: BatchLike, stream: Tensor | None, last: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `StagedKit.part`; raises SpecError for a last part that is no loss, and for another that is no tensor."""
        given: object = self._kit.part(module, batch, stream, last)
        if last:
            return self._pair(given)
        if isinstance(given, Tensor):
            return given
        raise _error(
            self._target,
            found=f"part() of a stage that is not the last gives {_described(given)}",
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
    factory = _find(spec.target)
    _check_arguments(spec.target, factory, spec.args)
    made = _call(spec.target, factory, spec.args)
    kit = _ModuleKit(factory, spec.args) if isinstance(made, nn.Module) else _as_kit(spec.target, made)
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


def _find(target: str) -> Callable[..., Any]:
    """The factory itself."""
    path, attribute = target.split(":")
    module = _import(target, path)
    factory = getattr(module, attribute, None)
    if factory is None:
        raise _error(
            target,
            found=f"{_place(module)} has no {attribute}",
            why="the part after the colon names a function of the module",
            instead=_nearest(
                attribute, (name for name, value in vars(module).items() if callable(value)), path + ":"
            ),
        )
    if not callable(factory):
        raise _error(
            target,
            found=f"{attribute} is {_described(factory)}",
            why="the part after the colon must be a function: it is called with model.args",
            instead=f"def {attribute}(...): in {_place(module)}",
        )
    return cast(Callable[..., Any], factory)


def _import(target: str, path: str) -> ModuleType:
    """The module, with the working directory first on the path, as `python -m` has it."""
    here = look_here_first()
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path != missing and not path.startswith(missing + "."):
            raise _failed(target, error, f"importing {path} fails") from error
        parent, _, name = missing.rpartition(".")
        folders = getattr(sys.modules[parent], "__path__", ()) if parent else [here]
        files = (entry for folder in folders if Path(folder).is_dir() for entry in Path(folder).iterdir())
        names = (entry.stem for entry in files if entry.suffix == ".py" or entry.is_dir())
        raise _error(
            target,
            found=f"no module {missing} (looked first in {here})",
            why="the part before the colon is imported as Python would",
            instead=_nearest(name, names, f"{parent}." if parent else "")
            or "the module's dotted name, or start in the folder that holds it",
        ) from error
    except Exception as error:
        raise _failed(target, error, f"importing {path} fails") from error


def _check_arguments(target: str, factory: Callable[..., Any], args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        raise _error(
            target,
            found=f"model.args = {args}: {error}",
            why=f"the factory is called with model.args, and it takes {signature}",
            instead="[model.args] with " + (", ".join(signature.parameters) or "nothing in it"),
        ) from error


def _call(target: str, factory: Callable[..., Any], args: dict[str, Any]) -> object:
    try:
        with torch.random.fork_rng(devices=[]):
            return factory(**args)
    except FourfoldError:
        raise
    except Exception as error:
        raise _failed(target, error, "the factory fails") from error


def _as_kit(target: str, made: object) -> ModelKit:
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise _error(
            target,
            found=f"the factory returned {_described(made)} without {', '.join(missing)}",
            why=f"a model is an nn.Module, or an object with {', '.join(_METHODS)}",
            instead="see docs/own_model.md and examples/own_model.py",
        )
    return cast(ModelKit, made)


def _error(target: str, found: str, why: str, instead: str) -> SpecError:
    return SpecError(Problem(asked=f'model.target = "{target}"', found=found, why=why, instead=instead))


def _failed(target: str, error: Exception, what: str) -> SpecError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return _error(
        target,
        found=f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})",
        why=what,
        instead="mend it there; --debug shows the whole traceback",
    )


def _nearest(name: str, names: Iterable[str], prefix: str) -> str:
    """What was probably meant, or the names there are."""
    known = sorted(known for known in names if not known.startswith("_"))
    close = get_close_matches(name, known, n=1)
    if close:
        return prefix + close[0]
    return "one of " + ", ".join(known[:8]) if known else ""


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_described(part) for part in value) + ")"
    return f"a {type(value).__name__}"
