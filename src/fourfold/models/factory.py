"""A user's factory: found by `model.target`, called with `model.args`; what is wrong with it, in four parts."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from fourfold.models.protocol import ModelKit
from fourfold.spec.errors import FourfoldError, Problem, SpecError
from fourfold.spec.target import look_here_first

_METHODS = ("build", "loss", "sharding", "blocks")


def find(target: str) -> Callable[..., Any]:
    """The factory itself."""
    path, attribute = target.split(":")
    module = _import(target, path)
    factory = getattr(module, attribute, None)
    if factory is None:
        raise wrong(
            target,
            found=f"{_place(module)} has no {attribute}",
            why="the part after the colon names a function of the module",
            instead=_nearest(
                attribute, (name for name, value in vars(module).items() if callable(value)), path + ":"
            ),
        )
    if not callable(factory):
        raise wrong(
            target,
            found=f"{attribute} is {described(factory)}",
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
            raise failed(target, error, f"importing {path} fails") from error
        parent, _, name = missing.rpartition(".")
        folders = getattr(sys.modules[parent], "__path__", ()) if parent else [here]
        files = (entry for folder in folders if Path(folder).is_dir() for entry in Path(folder).iterdir())
        names = (entry.stem for entry in files if entry.suffix == ".py" or entry.is_dir())
        raise wrong(
            target,
            found=f"no module {missing} (looked first in {here})",
            why="the part before the colon is imported as Python would",
            instead=_nearest(name, names, f"{parent}." if parent else "")
            or "the module's dotted name, or start in the folder that holds it",
        ) from error
    except Exception as error:
        raise failed(target, error, f"importing {path} fails") from error


def check_arguments(target: str, factory: Callable[..., Any], args: dict[str, Any]) -> None:
    """Raises SpecError where the factory does not take `args`."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        raise wrong(
            target,
            found=f"model.args = {args}: {error}",
            why=f"the factory is called with model.args, and it takes {signature}",
            instead="[model.args] with " + (", ".join(signature.parameters) or "nothing in it"),
        ) from error


def call(target: str, factory: Callable[..., Any], args: dict[str, Any]) -> object:
    """What the factory makes, without a draw from the process's stream; raises SpecError where it fails."""
    try:
        with torch.random.fork_rng(devices=[]):
            return factory(**args)
    except FourfoldError:
        raise
    except Exception as error:
        raise failed(target, error, "the factory fails") from error


def as_kit(target: str, made: object) -> ModelKit:
    """What the factory made; raises SpecError unless it has the methods of a kit."""
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise wrong(
            target,
            found=f"the factory returned {described(made)} without {', '.join(missing)}",
            why=f"a model is an nn.Module, or an object with {', '.join(_METHODS)}",
            instead="see docs/own_model.md and examples/own_model.py",
        )
    return cast(ModelKit, made)


def wrong(target: str, found: str, why: str, instead: str) -> SpecError:
    """What a user's model gives, and cannot be."""
    return SpecError(Problem(asked=f'model.target = "{target}"', found=found, why=why, instead=instead))


def failed(target: str, error: Exception, what: str) -> SpecError:
    """An error that a user's code raises: what, and the line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return wrong(
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


def described(value: object) -> str:
    """What a user's method returned, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return "(" + ", ".join(described(part) for part in value) + ")"
    if value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 40):
        return repr(value)
    return f"a {type(value).__name__}"
