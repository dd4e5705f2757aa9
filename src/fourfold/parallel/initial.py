"""Initial values where they are held: each rank makes the boxes of its own, and none ever has the whole model."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fourfold.models.boxes import box_of
from fourfold.models.initial import initial_values
from fourfold.models.protocol import BoxedKit, LossModule
from fourfold.parallel.clip import local
from fourfold.spec.boxes import Box


@torch.no_grad()
def fill_boxes(module: LossModule, kit: BoxedKit, seed: int, device: torch.device) -> None:
    """Give `module`, spread on the meta device, memory on `device` and the values that `kit.build(seed)` would have.

    Buffers that have values keep them. Collectives: none.
    """
    buffers = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}
    give_memory(module, device)
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    for name, parameter in module.module.named_parameters():
        box = (
            box_of(parameter)
            if isinstance(parameter, DTensor)
            else Box((0,) * parameter.ndim, tuple(parameter.shape))
        )
        values = initial_values(seed, name, kit.start(name), box.size, box.offset, parameter.shape)
        local(parameter).copy_(values)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Memory without values for what is on the meta device; ties stay ties."""
    ties = _ties(module)
    module.to_empty(device=device)
    for first, others in ties:
        for owner, key in others:
            owner._parameters[key] = first[0]._parameters[first[1]]


_At = tuple[nn.Module, str]


def _ties(module: nn.Module) -> list[tuple[_At, list[_At]]]:
    """Where each tied parameter stands, first and else: with other memory torch makes one of it for each place."""
    places: dict[int, list[_At]] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, key))
    return [(first, others) for first, *others in places.values() if others]
