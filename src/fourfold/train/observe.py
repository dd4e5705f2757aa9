"""Looking at a model in mid-run: what runs in here is no part of the training, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fourfold.parallel.mesh import stage_group
from fourfold.train.setup import Training
from fourfold.train.streams import restore_streams, streams_of


@contextmanager
def untouched(training: Training) -> Iterator[None]:
    """Buffers (running statistics) and this rank's random streams are afterwards as they were. Collectives: none."""
    rank = training.joined.rank.rank
    buffers = [(buffer, buffer.clone()) for buffer in training.model.buffers()]
    streams = streams_of(rank)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        restore_streams(rank, streams)


@contextmanager
def observing(training: Training) -> Iterator[None]:
    """The same for forwards in evaluation mode, without gradients, with the buffers that rank 0 has.

    Collectives: those of `share_buffers`.
    """
    share_buffers(training)
    modes = [(module, module.training) for module in training.model.modules()]
    training.model.eval()
    try:
        with untouched(training), training.parallel.observing(), torch.no_grad():
            yield
    finally:
        for module, mode in modes:  # not train(): a part that its owner keeps in evaluation mode stays there
            module.training = mode


@torch.no_grad()
def share_buffers(training: Training) -> None:
    """Give every rank rank 0's buffers, as the next step's first forward would: of each stage those of its first rank.

    Running statistics are each rank's own between the two: neither a checkpoint nor a validation could be of one model.
    Collectives: one broadcast for each buffer, among the ranks that have it; none where that is one.
    """
    if training.parallel.degree == 1:
        return
    group = stage_group(training.parallel.grid, training.device.type)
    for buffer in training.model.buffers():
        data = buffer.contiguous().reshape(-1).view(torch.uint8)  # gloo does not know every dtype
        dist.broadcast(data, group=group, group_src=0)
        buffer.copy_(data.view(buffer.dtype).view(buffer.shape))
