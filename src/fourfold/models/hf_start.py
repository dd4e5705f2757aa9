"""Where the values of a transformers model start, as its own `_init_weights` says; its buffers get theirs here.

transformers draws initial values from torch's random stream, in the order in which modules are made: they would depend
on who makes what. Here its functions of `transformers.initialization` only note the distribution of each parameter;
the values are `initial.fill`'s, by seed and name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.models.protocol import Start
from fourfold.spec.errors import Problem, SpecError

_FURTHEST = 6.0  # standard deviations: nothing that `draws.normal` gives lies beyond


def starts_of(network: Any) -> dict[str, Start]:
    """The start of each parameter of `network`, a transformers model whose parameters are on the meta device.

    Its buffers, on the CPU, get their values. Raises SpecError for a parameter or buffer that its `_init_weights` says
    nothing of, and for values that are neither one number nor normal.
    """
    notes = _Notes(network)
    for buffer in notes.buffers.values():
        buffer._is_hf_initialized = False  # type: ignore[attr-defined]
    with torch.no_grad(), _noted(notes):
        for module, owner in _owners(network):
            owner._init_weights(module)
    lost = [name for name in notes.names.values() if name not in notes.starts]
    empty = [name for key, name in notes.buffer_names.items() if key not in notes.filled]
    problems = [_unknown(network, name, what) for name, what in notes.strange.items()]
    problems += [_unsaid(network, "parameter", name) for name in lost if name not in notes.strange]
    problems += [_unsaid(network, "buffer", name) for name in empty]
    if problems:
        raise SpecError(problems)
    return notes.starts


def _owners(network: Any) -> list[tuple[nn.Module, Any]]:
    """Every module, parts before wholes as transformers goes, with the innermost of its models around it."""
    from transformers import PreTrainedModel

    found: list[tuple[nn.Module, Any]] = []

    def walk(module: nn.Module, owner: Any) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child in module.children():
            walk(child, owner)
        found.append((module, owner))

    walk(network, network)
    return found


class _Notes:
    """What is noted of each parameter: by name, for tied ones by the first."""

    def __init__(self, network: nn.Module) -> None:
        self.names = {id(p): name for name, p in network.named_parameters()}
        self.buffers = dict(network.named_buffers())
        self.buffer_names = {id(buffer): name for name, buffer in self.buffers.items()}
        self.starts: dict[str, Start] = {}
        self.strange: dict[str, str] = {}
        self.filled: set[int] = set()

    def note(self, tensor: Tensor, what: str, start: Start | None) -> bool:
        """A parameter's start; False where it is no parameter, and the function is to run."""
        name = self.names.get(id(tensor))
        if name is None:
            self.filled.add(id(tensor))
            return tensor.is_meta  # a part of a parameter: told by what it is a part of
        self.strange.pop(name, None)
        if start is None:
            self.strange[name] = what
        else:
            self.starts[name] = start
        return True


@contextmanager
def _noted(notes: _Notes) -> Iterator[None]:
    """While it lasts, transformers' functions of initial values note what they would do to parameters."""
    from transformers import initialization

    own: dict[str, Callable[..., Any]] = {
        name: value
        for name, value in vars(initialization).items()
        if name.endswith("_") and not name.startswith("_") and callable(value)
    }
    try:
        for name, function in own.items():
            setattr(initialization, name, _noting(notes, name, function))
        yield
    finally:
        for name, function in own.items():
            setattr(initialization, name, function)


def _noting(notes: _Notes, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def instead(tensor: Tensor, *args: Any, **more: Any) -> Any:
        if notes.note(tensor, name, _start(name, args, more)):
            return tensor
        return function(tensor, *args, **more)

    return instead


def _start(name: str, args: tuple[Any, ...], more: Mapping[str, Any]) -> Start | None:
    """What a function of transformers.initialization does, as a start; None for another distribution."""

    def given(at: int, key: str, default: float) -> float:
        return float(args[at] if len(args) > at else more.get(key, default))

    if name in ("zeros_", "ones_"):
        return Start(float(name == "ones_"), 0.0)
    if name == "constant_":
        return Start(given(0, "val", 0.0), 0.0)
    if name not in ("normal_", "trunc_normal_"):
        return None
    mean, std = given(0, "mean", 0.0), given(1, "std", 1.0)
    if name == "trunc_normal_":
        room = min(mean - given(2, "a", -2.0), given(3, "b", 2.0) - mean)
        if room < _FURTHEST * std:
            return None
    return Start(mean, std)


def _unknown(network: Any, name: str, what: str) -> Problem:
    return Problem(
        asked=f'initial values of "{name}"',
        found=f"{type(network).__name__} starts it by {what}",
        why="values that every layout can make for itself are one number, or normal",
        instead="another architecture",
    )


def _unsaid(network: Any, kind: str, name: str) -> Problem:
    return Problem(
        asked=f'initial values of the {kind} "{name}"',
        found=f"_init_weights of {type(network).__name__} says nothing of it",
        why="it would start with whatever lay in memory",
        instead="another architecture",
    )
