"""Attention of transformers' models by ours: causal, inside documents, in a window, and across context parallel.

transformers asks a table of functions for the one that `attn_implementation` names, and hands over whatever the model
was called with; ours is in that table under `NAME`, and what it needs comes along as the keyword `attending`.

Letters: B rows, T tokens, t those that are here, H query heads, K key/value heads, D features of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.collectives.context import Context, Mask
from fourfold.models.attention import attend, mask_between
from fourfold.spec.errors import Problem, SpecError

NAME = "fourfold"
# What models hand over beside what is named below, and attention has nothing to do with.
_IDLE = (
    *("position_ids", "position_embeddings", "use_cache", "cache", "cache_position", "output_attentions"),
    *(
        "output_hidden_states",
        "return_dict",
        "layer_idx",
        "is_causal",
        "attention_mask",
        "num_items_in_batch",
    ),
)


@dataclass(slots=True)
class Attending:
    """What every layer of one forward needs.

    documents  int32 [B, T] of whole rows; None = every earlier token is seen. length: T
    context    None, or where the tokens stand that are here of each row
    windows    of the layers that attended, in order: how many tokens back each sees, its own among them
    """

    documents: Tensor | None
    context: Context | None
    length: int
    windows: list[int | None] = field(default_factory=list)
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)
    _between: dict[tuple[int | None, torch.dtype], Mask] = field(default_factory=dict)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """query [B, H, t, D], key and value [B, K, t, D] -> [B, H, t, D]."""
        self.windows.append(window)
        near = None if window is None or window >= self.length else window
        at = (near, value.dtype)
        if at not in self._between:
            self._between[at] = partial(_mask, self.documents, near, value.device, value.dtype)
        if self.context is not None:
            return self.context.attend(query, key, value, self._between[at])
        if self.documents is None and near is None:
            return attend(query, key, value, None)
        if at not in self._masks:
            places = torch.arange(self.length, device=value.device)
            self._masks[at] = self._between[at](places, places)
        return attend(query, key, value, self._masks[at])


def _mask(
    documents: Tensor | None,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    rows: Tensor,
    columns: Tensor,
) -> Tensor:
    """As `attention.mask_between`, and of nothing that is `window` tokens back or more."""
    rows, columns = rows.to(device), columns.to(device)
    mask = mask_between(documents, rows, columns, dtype)
    if window is None:
        return mask
    return mask.masked_fill(rows[:, None] - columns[None, :] >= window, float("-inf"))


def registered() -> str:
    """The name under which transformers finds our attention, which is there afterwards."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # No part of compiled code: it counts layers, which would make another code for each.
    apart = torch.compiler.disable(_attention)  # type: ignore[no-untyped-call]
    ALL_ATTENTION_FUNCTIONS.register(NAME, apart)
    return NAME


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    attending: Attending | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, H, t, D], key and value [B, K, t, D] -> ([B, t, H, D], None)."""
    asked = f'attention of "{type(module).__name__}" by ours'
    if attending is None:
        found = "it was not handed what the model was called with"
        raise SpecError(Problem(asked, found, "it would see across documents", "another architecture"))
    _require_known(asked, module, attention_mask, dropout, more)
    if attending.context is not None and key.shape != value.shape:
        found = f"keys of {key.shape[-1]} features, values of {value.shape[-1]}"
        why = "context parallel sends them as one tensor"
        raise SpecError(Problem(asked, found, why, "--set layout.cp=1"))
    width = query.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        query = query * (scaling * width**0.5)  # what the kernel divides by again
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotary turns widen them
    mixed = attending(query, key, value, sliding_window)
    return mixed.transpose(1, 2).contiguous(), None


def _require_known(
    asked: str, module: nn.Module, mask: Tensor | None, dropout: float, more: Mapping[str, Any]
) -> None:
    """Raises SpecError for what ours does not do: it would be left out without a word."""
    strange = [
        key for key, value in more.items() if key not in _IDLE and value is not None and value is not False
    ]
    if mask is not None:
        strange.append("attention_mask")
    if dropout:
        strange.append(f"dropout {dropout:g}")
    if not getattr(module, "is_causal", True) or more.get("is_causal") is False:
        strange.append("is_causal = False")
    if strange:
        found = "it is to heed " + ", ".join(strange)
        why = "ours is causal, inside documents and in a window; the rest would silently be left out"
        raise SpecError(Problem(asked, found, why, "another architecture"))
