"""What a run is between two steps, as tensors and plain values: all that a resumed one needs to be the same run.

model.<name>                parameters and buffers; a tied tensor once, under its first name
optimizer.<name>.<slot>     exp_avg, exp_avg_sq and step of each parameter that has been updated
rank<r>.<stream>            the random streams of each rank: torch, numpy, python (and cuda)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from fourfold.train.setup import Training
from fourfold.train.streams import streams_of

_SLOTS = ("exp_avg", "exp_avg_sq", "step")


def tensors_of(training: Training) -> dict[str, Tensor]:
    """Every tensor of the state, by name; they are the live ones, not copies, but for the streams."""
    held: dict[str, Tensor] = {}
    for name, tensor in (*training.model.named_parameters(), *training.model.named_buffers()):
        held[f"model.{name}"] = tensor.detach()
    for name, parameter in training.named_parameters().items():
        for slot, value in training.optimizer.state.get(parameter, {}).items():
            held[f"optimizer.{name}.{slot}"] = value
    return held | streams_of(training.joined.rank.rank)


def make_room(training: Training, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors to load into, for a checkpoint that holds `names`: `tensors_of`, with the optimizer's slots made.

    AdamW makes a parameter's slots when it first updates it; one that never took part has none, and must not get any.
    """
    wanted = set(names)
    for name, parameter in training.named_parameters().items():
        slots = [slot for slot in _SLOTS if f"optimizer.{name}.{slot}" in wanted]
        if slots:
            training.optimizer.state[parameter] = {slot: _slot(parameter, slot) for slot in slots}
    return tensors_of(training)


def _slot(parameter: Parameter, slot: str) -> Tensor:
    if slot == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)
