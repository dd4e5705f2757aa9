"""This process as a rank that has joined already: a pool's rank, for the trainer's own functions."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fourfold.launch.rank import Joined, Rank


def joined_here() -> Joined:
    """The default process group's rank and world, all on this machine; on CUDA devices if the group has NCCL."""
    rank, world = dist.get_rank(), dist.get_world_size()
    on_cuda = "nccl" in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    # torch has no public name for the group's store; the trainer's functions called here do not use it.
    return Joined(Rank(rank, rank, world, world), _get_default_store(), device)
