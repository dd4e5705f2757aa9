"""In what a checkpoint may differ from the model by leave of the Spec: a part that was added, or taken away, since.

A tensor that the checkpoint lacks keeps the value a new run begins with, and its optimizer begins with it. A tensor
that the model lacks is left out, with its optimizer's state. Another dtype or shape is never allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fourfold.checkpoint.load import is_named
from fourfold.spec.errors import DataError, Problem
from fourfold.spec.training import CheckpointSpec

_MODEL, _OPTIMIZER = "model.", "optimizer."


class Allowed(NamedTuple):
    """What the Spec's leave was used for: tensors, in order; and `unused`, the settings that named none of them."""

    initial: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def another_model(self) -> bool:
        """Whether the model itself is not the one that was saved, but only almost."""
        return any(name.startswith(_MODEL) for name in (*self.initial, *self.left_out))


def allowed(spec: CheckpointSpec, held: Collection[str], wanted: Collection[str]) -> Allowed:
    """held: the tensors of a checkpoint; wanted: those of the training.

    What is allowed to be missing, and what to be left over; the rest is for the census of a load to refuse.
    Raises DataError where only some of a parameter's moments would be put back.
    """
    missing = sorted(set(wanted) - set(held))
    surplus = sorted(set(held) - set(wanted))
    initial = [name for name in missing if is_named(name, spec.allow_missing)]
    left_out = [
        name
        for name in surplus
        if is_named(name, spec.allow_surplus)
        or ((tensor := _updated_by(name)) in surplus and is_named(tensor, spec.allow_surplus))
    ]
    torn = sorted({_updated_by(name) for name in initial if name.startswith(_OPTIMIZER)} & _updated(held))
    if torn:
        raise DataError([_torn(tensor) for tensor in torn])
    unused = [
        *_unused("allow_missing", spec.allow_missing, missing),
        *_unused("allow_surplus", spec.allow_surplus, surplus),
    ]
    return Allowed(tuple(initial), tuple(left_out), tuple(unused))


def _updated_by(name: str) -> str:
    """The tensor of the model that a slot of the optimizer belongs to; "" for any other name."""
    if not name.startswith(_OPTIMIZER):
        return ""
    return _MODEL + name.removeprefix(_OPTIMIZER).rpartition(".")[0]


def _updated(names: Collection[str]) -> set[str]:
    return {_updated_by(name) for name in names} - {""}


def _unused(key: str, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    return [
        f"checkpoint.{key}: {pattern}"
        for pattern in patterns
        if not any(is_named(name, [pattern]) for name in names)
    ]


def _torn(tensor: str) -> Problem:
    name = tensor.removeprefix(_MODEL)
    return Problem(
        asked=f"go on with some of the optimizer's state of {name}, the rest as in a new run",
        found="the checkpoint holds the one and lacks the other",
        why="AdamW's two moments and its count of steps correct each other: one without the others is a wrong update",
        instead="a checkpoint that has all of it, or none of it",
    )
