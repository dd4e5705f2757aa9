"""Bytes of training state that this rank really holds, counted from storages: each once, whatever views it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from fourfold.parallel.apply import Parallel
from fourfold.parallel.clip import local
from fourfold.parallel.sharded import Sharded
from fourfold.plan.state_bytes import CATEGORIES, Category

Found = Iterator[tuple[Category, Tensor]]


@torch.no_grad()
def held(parallel: Parallel, moments: Iterable[Tensor]) -> Mapping[Category, int]:
    """Bytes by category, on whatever device they are.

    moments: every tensor of the optimizer's state; those in a mapped file are "on disk". What the categories mean
    stands in `plan.state_bytes`. Activations are no state and are not counted. Collectives: none.
    """
    found = dict.fromkeys(CATEGORIES, 0)
    seen: set[int] = set()
    for category, tensor in _state(parallel, moments):
        storage = local(tensor).untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found["on disk" if storage.filename is not None else category] += storage.nbytes()
    if isinstance(parallel.module, DistributedDataParallel):
        found["buffers"] += _empty_buckets(parallel.module)
    return found


def _state(parallel: Parallel, moments: Iterable[Tensor]) -> Found:
    """Every tensor of the state, by category, the more telling first: a storage counts where it is met first."""
    if isinstance(parallel.reduction, Sharded):
        for group in parallel.reduction.groups:
            yield from _of_group(group)
    for parameter in parallel.network.parameters():
        yield "parameters", parameter
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    for tensor in moments:
        yield "moments" if tensor.ndim else "other", tensor
    for buffer in parallel.network.buffers():
        yield "other", buffer


def _of_group(group: FSDPParamGroup) -> Found:
    """What FSDP2 holds for one unit: torch has no public name for it, and the tests hold it to the prediction."""
    for own in group.fsdp_params:
        yield "parameters", own._sharded_param_data
        for gathered in own.all_gather_outputs:
            yield "gathered", gathered
        whole: Any = getattr(own, "_unsharded_param", None)
        for gradient in (
            own.sharded_param.grad,
            own.unsharded_accumulated_grad,
            getattr(whole, "grad", None),
        ):
            if gradient is not None:
                yield "gradients", gradient
    if group._partial_reduce_output is not None:  # summed over the shards' ranks, not yet over the replicas
        yield "gradients", group._partial_reduce_output
    if group._all_gather_result is not None:
        yield "buffers", group._all_gather_result.all_gather_output
    if group._all_reduce_state is not None:
        yield "buffers", group._all_reduce_state.all_reduce_input
    shared = vars(group.comm_ctx)  # empty before the first forward
    if (gathering := shared.get("all_gather_state")) is not None:
        yield "buffers", gathering.all_gather_result.all_gather_output
    for state in shared.get("reduce_scatter_states", ()):
        yield "buffers", state.reduce_scatter_input


def _empty_buckets(wrapped: DistributedDataParallel) -> int:
    """Bytes of DDP's buckets, which stay all the time, but for those that gradients are views of just now."""
    told = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
    total = sum(int(size) for size in str(sizes).split(",") if size.strip())
    views = {
        p.grad.untyped_storage()._cdata: p.grad.untyped_storage().nbytes()
        for p in wrapped.parameters()
        if p.grad is not None and p.grad._is_view()
    }
    return total - sum(views.values())
