"""Initial values where they are held: each rank makes the boxes of its own, and none ever has the whole model."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fourfold.models.boxes import box_of
from fourfold.models.initial import initial_values
from fourfold.models.protocol import BoxedKit, LossModule


@torch.no_grad()
def fill_boxes(module: LossModule, kit: BoxedKit, seed: int, device: torch.device) -> None:
    """Give `module`, spread on the meta device, memory on `device` and the values that `kit.build(seed)` would have.

    Every parameter is a DTensor. Buffers that have values keep them. Collectives: none.
    """
    buffers = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    for name, parameter in module.module.named_parameters():
        assert isinstance(parameter, DTensor), "what is built on the meta device is cut"
        box = box_of(parameter)
        values = initial_values(seed, name, kit.start(name), box.size, box.offset, parameter.shape)
        parameter.to_local().copy_(values)
