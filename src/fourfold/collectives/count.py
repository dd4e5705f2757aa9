"""Which collectives a piece of work asks for: each one seen where torch dispatches it, real or rehearsed.

What is counted is what this rank takes part in. Bytes are those of the whole: of an all-gather's output, of a
reduce-scatter's input.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from fourfold.collectives.operations import Operations

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "receive",
    "barrier",
]

# The operators torch has for each, and where the argument stands that is the whole (c10d: torch 2.13's schemas).
_C10D: dict[str, tuple[Kind, int]] = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "allgather_coalesced_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "recv_any_source_": ("receive", 0),
    "barrier": ("barrier", -1),
}
# Of the functional ones the first argument is this rank's own; an all-gather's whole is as often as much as ranks are.
_FUNCTIONAL: dict[str, Kind] = {
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "all_reduce_coalesced_": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_out": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "shard_dim_alltoall": "all-to-all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


class Seen(NamedTuple):
    """One sort of collective: between `ranks`, `whole_bytes` each."""

    kind: Kind
    ranks: tuple[int, ...]
    whole_bytes: int


class Collectives(Operations):
    """While it is entered, every collective of this process and thread is counted, and those of backwards in it.

    found: how often each was asked for. each: for how many a collective stands just now; 1, unless it is changed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[Seen] = Counter()
        self.each = 1

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Operations.run`."""
        if func.namespace in _NAMESPACES:
            seen = _seen(func, args)
            if seen is not None:
                self.found[seen] += self.each
        return super().run(func, args, kwargs)


def _seen(func: Any, args: tuple[Any, ...]) -> Seen | None:
    name = func._schema.name.partition("::")[2]
    if func.namespace == "c10d":
        if name not in _C10D:
            return None
        kind, at = _C10D[name]
        group = next(
            dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject)
        )  # before any ReduceOp
        return Seen(kind, _ranks(group), 0 if at < 0 else _bytes(args[at]))
    if name not in _FUNCTIONAL:
        return None  # a wait
    kind = _FUNCTIONAL[name]
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    ranks = _ranks(named["group_name"])
    whole = _bytes(args[0]) * (len(ranks) if kind == "all-gather" else 1)
    return Seen(kind, ranks, whole)


def _ranks(group: Any) -> tuple[int, ...]:
    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]
    return tuple(dist.get_process_group_ranks(group))


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)
