"""Bytes of training state that this rank really holds, counted from storages: each once, whatever views it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from fourfold.parallel.apply import Parallel
from fourfold.parallel.data_parallel import Replicas
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
        # No operation on it: one without values would seem to fill a storage that was emptied.
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found["on disk" if storage.filename is not None else category] += storage.nbytes()
    for reduction in parallel.reductions:
        if isinstance(reduction, Replicas):
            found["buffers"] += reduction.empty_bucket_bytes()
    return found


def _state(parallel: Parallel, moments: Iterable[Tensor]) -> Found:
    """Every tensor of the state, by category, the more telling first: a storage counts where it is met first."""
    for reduction in parallel.reductions:
        if isinstance(reduction, Sharded):
            for group in reduction.groups:
                yield from _of_group(group)
    if parallel.leaves is not None:
        yield from (("gradients", each) for each in parallel.leaves.held())
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
