"""The loss as a pair: a sum over valid targets, and how many there are.

The trainer divides the sum over all ranks and microbatches by the count over all of them, so nothing here divides
by a number of rows or tokens.  Without a valid target the sum is 0, its gradients are 0, and nothing is NaN.

Letters: B rows, T tokens, V vocabulary or classes, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_IGNORED = -100


def wide(x: Tensor) -> Tensor:
    """`x` in fp32, or in fp64 if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def cross_entropy(logits: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy in nats: float [..., V], int64 [...], bool [...] -> (sum in fp32 or wider, count int64)."""
    masked = targets.masked_fill(~valid, _IGNORED)
    total = F.cross_entropy(
        wide(logits).flatten(0, -2), masked.flatten(), ignore_index=_IGNORED, reduction="sum"
    )
    return total, valid.sum()


def squared_error(outputs: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of a vector, meant over its features: float [B, F] twice, bool [B] -> (sum, count int64)."""
    error = (wide(outputs) - targets).square().mean(-1)
    return torch.where(valid, error, 0.0).sum(), valid.sum()
