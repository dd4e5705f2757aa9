"""Where the tokens of a part of each row stand, where rows are cut between ranks (context parallel).

Letters: B rows, T tokens of a whole row, t tokens that are here, H query heads, K key/value heads, D features of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Mask = Callable[[Tensor, Tensor], Tensor]
"""(rows, columns), int64 places -> what is added to the scores [B, 1, rows, columns]."""


@dataclass(frozen=True, slots=True)
class Context:
    """A part of each row.

    runs    the places in the whole row of the tokens that are here, as ranges (first, beyond), in their order
    length  T
    attend  (query [B, H, t, D], key and value [B, K, t, D], mask) -> [B, H, t, D]: attention to the tokens of the whole
            row, wherever they are
    gather  of what the tokens here have, [B, t, ...], that of all tokens of the row, [B, T, ...], without a gradient
    inputs, valid: of whole rows, [B, T], as the batch had them
    """

    runs: tuple[tuple[int, int], ...]
    length: int
    attend: Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
    gather: Callable[[Tensor], Tensor]
    inputs: Tensor
    valid: Tensor

    def here(self, whole: Tensor, dim: int) -> Tensor:
        """Of what every token of the row has, that of the tokens that are here."""
        return torch.cat([whole.narrow(dim, first, beyond - first) for first, beyond in self.runs], dim)
