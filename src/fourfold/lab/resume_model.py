"""The decoder of the resume exercise: its dropout is torch's own, as in most models, and draws from the rank's stream.

The product's decoder draws by arithmetic and has no stream that could be lost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from fourfold.models.decoder import DecoderKit
from fourfold.models.draws import Draws
from fourfold.models.loss import cross_entropy
from fourfold.models.protocol import BatchLike
from fourfold.spec.model import DecoderSpec

DROPOUT = 0.2

DRAWN_FROM: dict[int, str] = {}
"""By step (from 0), a digest of the process-wide stream as it was when the step's last forward began."""


class StreamDraws(Draws):
    """Dropout from torch's process-wide stream: each call moves it on, so where it stands is state of the run."""

    def __init__(self) -> None:
        """It has no address, and needs none."""

    def dropout(self, x: Tensor, p: float, name: str | Tensor) -> Tensor:  # noqa: ARG002
        """Drop a share `p` of the elements, and scale up the rest."""
        return F.dropout(x, p)


class StreamDecoder(DecoderKit):
    """The product's decoder, but for where its dropout comes from."""

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        """See `ModelKit.loss`; dropout only while `module.training`."""
        draws = None
        if module.training:
            DRAWN_FROM[batch.step] = xxhash.xxh3_128_hexdigest(torch.get_rng_state().numpy().tobytes())
            draws = StreamDraws()
        return cross_entropy(module(batch.inputs, batch.documents, draws), batch.targets, batch.valid)


def decoder() -> StreamDecoder:
    """What `model.target` names: two blocks, 256 bytes as vocabulary."""
    spec = DecoderSpec(layers=2, width=32, heads=2, kv_heads=1, vocabulary=256, tied=True, dropout=DROPOUT)
    return StreamDecoder(spec)
