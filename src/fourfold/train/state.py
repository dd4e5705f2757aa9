"""What a run is between two steps, as tensors and plain values: all that a resumed one needs to be the same run.

model.<name>                parameters and buffers (those too that `state_dict` leaves out); a tied tensor once
optimizer.<name>.<slot>     exp_avg, exp_avg_sq and step of each parameter that has been updated
rank<r>.<stream>            the random streams of each rank: torch, numpy, python (and cuda)

Not there, because it follows from the Spec and the step: the learning rate and every other setting of the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from fourfold.collectives.agree import agree
from fourfold.parallel.clip import as_cut
from fourfold.record.rewind import Mark
from fourfold.spec.errors import FourfoldError, Problem
from fourfold.spec.value import Value
from fourfold.train.scaler import ScaleState
from fourfold.train.setup import Training
from fourfold.train.streams import streams_of

_SLOTS = ("exp_avg", "exp_avg_sq", "step")


class PlainState(Value):
    """What is no tensor. Step, data position, layout and hashes stand in the manifest.

    spec: settled. probe_loss: loss sum of the last step's batch under the saved parameters, as hexadecimal float.
    metrics: up to where metrics.jsonl belongs to this state. never_updated: parameters that have no moments yet.
    loss_scale: in fp16, of the next step; None in every other precision, and in checkpoints older than fp16.
    """

    spec: dict[str, Any]
    probe_loss: str
    metrics: Mark
    never_updated: tuple[str, ...] = Field(strict=False)
    loss_scale: ScaleState | None = None


def tensors_of(training: Training) -> dict[str, Tensor]:
    """Every tensor of the state, by name; they are the live ones, not copies, but for the streams.

    Raises FourfoldError for state of the optimizer that a later load would not know what to do with.
    """
    held: dict[str, Tensor] = {}
    for name, tensor in (*training.model.named_parameters(), *training.model.named_buffers()):
        held[f"model.{name}"] = tensor.detach()
    for name, parameter in training.named_parameters().items():
        slots = training.optimizer.state_of(name)
        if slots and set(slots) != set(_SLOTS):
            raise FourfoldError(_unknown_state(name, slots))
        for slot, value in slots.items():
            held[f"optimizer.{name}.{slot}"] = as_cut(value, parameter) if value.ndim else value
    return held | streams_of(training.joined.rank.rank)


def never_updated(training: Training) -> tuple[str, ...]:
    """Parameters without moments: frozen ones, and those that took part in no step so far."""
    return tuple(name for name in training.named_parameters() if not training.optimizer.state_of(name))


def everywhere(training: Training, names: Collection[str]) -> list[str]:
    """Those names that any rank has, in one order: the stages of a pipeline have their own.

    Collectives: one all-gather of objects, where there are stages.
    """
    if training.parallel.pipeline is None:
        return [*names]
    return list(
        dict.fromkeys(name for of_rank in agree(dict.fromkeys(names, ""), partly=True) for name in of_rank)
    )


def unsaved(training: Training) -> tuple[str, ...]:
    """Modules with state that is no tensor (torch's get_extra_state), which a checkpoint does not hold."""
    return tuple(
        name or "the model itself"
        for name, module in training.model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    )


def make_room(training: Training, names: Collection[str], without: Collection[str]) -> dict[str, Tensor]:
    """The tensors to load into, for a checkpoint that holds `names`: `tensors_of`, with the optimizer's slots made.

    AdamW makes a parameter's slots when it first updates it. Those that had none (`without`), and those that the
    checkpoint does not know, must not get any; every other one that is trained needs all of its slots.
    """
    for name in training.optimizer.trained:
        if f"model.{name}" in names and name not in without:
            training.optimizer.make_state(name)
    return tensors_of(training)


def _unknown_state(name: str, slots: Collection[str]) -> Problem:
    return Problem(
        asked=f"save the optimizer's state of {name}",
        found=f"it has {', '.join(sorted(map(str, slots)))}",
        why=f"a checkpoint holds {', '.join(_SLOTS)}: what it does not know it could not put back, or would drop",
        instead="the torch that this Fourfold is made for: pip install --force-reinstall fourfold",
    )
