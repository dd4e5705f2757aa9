"""Where torch's operations without values differ from real ones, in what they hold or in whether they can be at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.collectives.operations import Operations

_aten = torch.ops.aten
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index_put.default,
    _aten._unsafe_index.Tensor,
}


class AsReal(Operations):
    """While it is entered, a collective that is waited for gives no second tensor, and masks pick all that they can.

    What a mask picks (targets that are valid) has no length without values: it is as much as it can be at most.
    """

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Operations.run`."""
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return _aten.alias(args[0])
        if func in _INDEXED:
            args = (args[0], _picking_all(args[1]), *args[2:])
        elif func is _aten.masked_select.default:
            both = torch.broadcast_tensors(args[0], args[1])[0]  # type: ignore[no-untyped-call]
            return args[0].new_empty(both.numel())
        elif func is _aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        return super().run(func, args, kwargs)


def _picking_all(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`indices` with each mask as the indices of as many elements as it has, one tensor for each of its dims."""
    told: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            told.append(index)
        else:
            told += [index.new_zeros(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
    return told
