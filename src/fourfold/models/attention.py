"""Attention of the decoder, and what all its layers share in one forward: mask, rotary turns, draws.

Letters: B rows, T tokens, H query heads, K key/value heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.models.draws import Draws, draw_key
from fourfold.models.initial import Linear
from fourfold.models.routing import Rows

_APART = 1e30  # taken off a score across documents: exp() of it is exactly 0 in every dtype, yet it is finite


@dataclass(frozen=True, slots=True)
class Shared:
    """Made once per forward and read by every layer.

    attend  (query [B, H, T, D], key and value [B, K, T, D]) -> [B, H, T, D]
    turns   rotary turns, complex [T, 1, D/2]; None = no rotary positions
    draws   of dropout; None = no dropout
    rows    what experts need to know of whole rows; None = nothing
    """

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    turns: Tensor | None
    draws: Draws | None
    rows: Rows | None = None

    def dropout(self, x: Tensor, p: float, name: str | Tensor) -> Tensor:
        """Dropout on the output of the module called `name`, where this forward has any."""
        return x if self.draws is None else self.draws.dropout(x, p, name)


class Cached:
    """Tensors that depend on length, device and dtype only: the rotary turns and the causal mask.

    Held beside the modules, not as buffers: they are no state, and `module.to(dtype)` must not narrow them.
    """

    def __init__(self, head_width: int, theta: float) -> None:
        self._head_width = head_width
        self._theta = theta
        self._made: dict[tuple[str, int, torch.device, torch.dtype], Tensor] = {}

    def turns(self, length: int, like: Tensor) -> Tensor:
        """Rotary turns exp(i·t·theta**(-2d/D)): complex [T, 1, D/2], computed in fp64, complex64 unless fp64.

        Source: Su et al., arXiv 2104.09864, section 3.2.2.
        """
        dtype = torch.complex128 if like.dtype == torch.float64 else torch.complex64
        key = ("turns", length, like.device, dtype)
        if key not in self._made:
            with torch.inference_mode(False):
                pair = torch.arange(0, self._head_width, 2, dtype=torch.float64, device=like.device)
                place = torch.arange(length, dtype=torch.float64, device=like.device)
                angle = place[:, None, None] * self._theta ** (-pair / self._head_width)
                self._made[key] = torch.polar(torch.ones_like(angle), angle).to(dtype)
        return self._made[key]

    def mask(self, documents: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the scores: [B, 1, T, T], 0 where a token may look, else so low that its weight is 0.

        documents  int32 [B, T]; a token sees itself and earlier tokens of its own document, so no row is empty
        """
        causal = self._causal(documents.shape[1], documents.device)
        number = documents.float()
        apart = (number[:, None, :, None] - number[:, None, None, :]).square_()
        return torch.sub(causal, apart, alpha=_APART).to(dtype)

    def _causal(self, length: int, device: torch.device) -> Tensor:
        key = ("causal", length, device, torch.float32)
        if key not in self._made:
            with torch.inference_mode(False):
                later = torch.full((length, length), float("-inf"), device=device)
                self._made[key] = later.triu_(1)
        return self._made[key]


def mask_between(documents: Tensor | None, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """As `Cached.mask`, for the tokens at `rows` that look at those at `columns`: [B or 1, 1, rows, columns].

    documents  None: a token sees every earlier one. rows, columns: int64 places, on its device
    """
    later = columns[None, :] > rows[:, None]
    causal = torch.zeros(later.shape, device=rows.device).masked_fill_(later, float("-inf"))
    if documents is None:
        return causal[None, None].to(dtype)
    number = documents.float()
    apart = (number[:, None, rows, None] - number[:, None, None, columns]).square_()
    return torch.sub(causal, apart, alpha=_APART).to(dtype)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Neighbouring features (2d, 2d+1) of each head turned by its token's place: [B, T, H, D], in fp32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    pairs = torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention by torch's fused kernel: query [B, H, t, D], key and value [B, K, T, D] -> [B, H, t, D].

    mask  added to the scores, [B, 1, t, T]; None = causal. Fewer key/value heads than query heads are shared by equal
    groups of those (Ainslie et al., arXiv 2305.13245).
    """
    grouped = key.shape[1] != query.shape[1]
    causal = mask is None
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal grouped-query attention; `Shared` has its kernel."""

    def __init__(
        self, name: str, width: int, heads: int, kv_heads: int, head_width: int, biases: bool, dropout: float
    ) -> None:
        super().__init__()
        self.head_width = head_width
        self.dropout = dropout
        self.output_key = draw_key(f"{name}.output")
        self.query = Linear(width, heads * head_width, bias=biases)
        self.key = Linear(width, kv_heads * head_width, bias=biases)
        self.value = Linear(width, kv_heads * head_width, bias=biases)
        self.output = Linear(heads * head_width, width, bias=biases)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """[B, T, width] -> [B, T, width]; the number of heads is read off the projections' outputs."""
        heads = (*x.shape[:2], -1, self.head_width)
        query, key, value = (project(x).view(heads) for project in (self.query, self.key, self.value))
        if shared.turns is not None:
            query, key = rotate(query, shared.turns), rotate(key, shared.turns)
        mixed = shared.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return shared.dropout(self.output(mixed.transpose(1, 2).flatten(2)), self.dropout, self.output_key)
