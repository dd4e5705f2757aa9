"""One microbatch, as the loader gives it and a model's loss takes it.

Letters: B rows of the microbatch, T tokens of a sequence, F features of a vector sample.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fourfold.collectives.context import Context


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one global batch that one rank sees in one forward.

    inputs     int64 [B, T] tokens, or float [B, F] features
    targets    int64 [B, T] tokens, float [B, F] or int64 [B] classes
    valid      bool [B, T] or [B]: which targets carry loss
    documents  int32 [B, T] document number inside the row, or None for vectors
    sample_ids int64 [B]: which sample each row is; -1 = filler row, of which no target is valid
    rows       int64 [B]: the row's place in the global batch (the logical index of its randomness)
    seed, step, epoch: of the run; a step counts from 0 here
    processed, nonpadding: tokens (or vectors) in the arrays, and those that are not padding
    context    None: all tokens of each row are here. Else inputs, targets and valid are those of a part of each row,
               [B, t], and it says which; documents are those of the whole row
    """

    inputs: Tensor
    targets: Tensor
    valid: Tensor
    documents: Tensor | None
    sample_ids: Tensor
    rows: Tensor
    seed: int
    step: int
    epoch: int
    processed: int
    nonpadding: int
    context: Context | None = None

    def part(self, context: Context) -> Batch:
        """Of each row the tokens that are at `context`."""
        assert self.context is None and self.documents is not None, "whole rows of tokens"
        inputs, targets, valid = (context.here(whole, 1) for whole in (self.inputs, self.targets, self.valid))
        return replace(self, inputs=inputs, targets=targets, valid=valid, context=context)

    def valid_count(self) -> int:
        """Targets that carry loss (reads the host copy; call it before moving to a device)."""
        return int(self.valid.sum())

    def to(self, device: torch.device, float_dtype: torch.dtype | None = None) -> Batch:
        """The same rows on `device`; float arrays cast to `float_dtype` if given.

        To a CUDA device from pinned memory, which nothing waits for: the copy runs beside what is queued already.
        """
        moved: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                cast = float_dtype if float_dtype is not None and value.is_floating_point() else None
                held = value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
                moved[field.name] = held.to(device=device, dtype=cast, non_blocking=True)
        return replace(self, **moved)  # type: ignore[arg-type]
