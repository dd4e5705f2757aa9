"""The adversary: the Spec's decoder with every part that has made a layout differ from one device.

Tied embedding and head, biases, dropout, a frozen parameter, and a feed-forward that only some rows use, in some steps
none at all. It goes wherever a user's own model goes:

    [model]
    kind = "import"
    target = "fourfold.verify.adversary:make"
    args = { decoder = { layers = 2, width = 64, heads = 4 }, every = 16, residue = 3 }

    [layout]
    unused_parameters = true

Letters: B rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fourfold.models.attention import Shared
from fourfold.models.decoder import Decoder, DecoderKit, with_corrections
from fourfold.models.initial import Linear, fill
from fourfold.models.protocol import BatchLike, Rule
from fourfold.spec.model import DecoderSpec, ImportSpec
from fourfold.spec.spec import Spec
from fourfold.spec.widths import ffn_width

TARGET = "fourfold.verify.adversary:make"
DROPOUT = 0.1  # where the Spec's own decoder has none


class Sometimes(nn.Module):
    """A feed-forward added to the stream of the rows in `rows` (bool [B]); where there is none it does not run."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.rows: Tensor | None = None
        self.up = Linear(spec.width, ffn_width(spec))
        self.down = Linear(ffn_width(spec), spec.width)

    def forward(self, x: Tensor, _shared: Shared) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        if self.rows is None or not bool(self.rows.any()):
            return x
        share = self.rows.to(x.dtype)[:, None, None]
        if isinstance(x, DTensor):
            whole = [Replicate()] * x.device_mesh.ndim
            share = DTensor.from_local(share, x.device_mesh, whole, run_check=False)
        return x + share * self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Adversary(Decoder):
    """A decoder with `Sometimes` behind its last block."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec)
        self._sometimes = spec.layers
        self.blocks.append(Sometimes(spec))
        self.get_parameter(frozen(spec)).requires_grad_(False)

    def choose(self, rows: Tensor) -> None:
        """Which rows (bool [B]) of the next forward use it."""
        part = self.blocks[self._sometimes]
        assert isinstance(part, Sometimes)
        part.rows = rows


class AdversaryKit(DecoderKit):
    """The adversary as a `BoxedKit`.

    every, residue: a row uses `Sometimes` if it has a valid target and its tokens add up to `residue` modulo `every`.
    """

    def __init__(self, spec: DecoderSpec, every: int, residue: int) -> None:
        adverse = {"tied": True, "biases": True, "dropout": spec.dropout or DROPOUT}
        self.spec = spec.model_copy(update=adverse)
        self._every, self._residue = every, residue
        super().__init__(self.spec)

    def build(self, seed: int, dtype: torch.dtype) -> Adversary:
        """See `ModelKit.build`."""
        module = Adversary(self.spec)
        fill(module, self.start, seed, dtype)
        return module

    def skeleton(self, dtype: torch.dtype) -> Adversary:
        """See `BoxedKit.skeleton`."""
        with torch.device("meta"):
            module = Adversary(self.spec).to(dtype)
        with_corrections(module, dtype)
        return module

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        """See `ModelKit.loss`."""
        self._choose(module, batch)
        return super().loss(module, batch)

    def part(
        self, module: nn.Module, batch: BatchLike, stream: Tensor | None, last: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `StagedKit.part`."""
        if last:
            self._choose(module, batch)
        return super().part(module, batch, stream, last)

    def _choose(self, module: nn.Module, batch: BatchLike) -> None:
        assert isinstance(module, Adversary)
        whole = batch if batch.context is None else batch.context
        module.choose(uses(whole.inputs, whole.valid, self._every, self._residue).to(batch.inputs.device))

    def ends(self, module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `StagedKit.ends`: `Sometimes` runs after the last block."""
        before, after = super().ends(module)
        return before, (f"blocks.{self.spec.layers}", *after)

    def sharding(self) -> dict[str, Rule]:
        """See `ModelKit.sharding`: `Sometimes` has a column and a row between which one DTensor runs."""
        part = f"blocks.{self.spec.layers}"
        return super().sharding() | {
            f"{part}.up.*": "column",
            f"{part}.down.weight": "row",
            f"{part}.down.bias": "replicate",
        }


def frozen(spec: DecoderSpec) -> str:
    """The parameter of the first block that is not trained: of its feed-forward, or of its experts."""
    dense = spec.moe is None or spec.moe.first_dense_layers > 0
    return "blocks.0.ffn.up.weight" if dense else "blocks.0.ffn.routed.experts.up"


def uses(inputs: Tensor, valid: Tensor, every: int, residue: int) -> Tensor:
    """Which rows use `Sometimes`: int64 [B, T], bool [B, T] -> bool [B]. A property of the sample alone."""
    return (inputs.sum(1) % every == residue) & valid.any(1)


def sometimes_used(spec: Spec) -> str | None:
    """Of an adversarial Spec the parameter by which it shows whether a step used `Sometimes`."""
    if not isinstance(spec.model, ImportSpec) or spec.model.target != TARGET:
        return None
    return f"blocks.{spec.model.args['decoder']['layers']}.down.bias"


def make(decoder: dict[str, Any], every: int = 16, residue: int = 0) -> AdversaryKit:
    """The factory: `decoder` has the keys of a Spec's [model] of kind "decoder"."""
    return AdversaryKit(DecoderSpec.model_validate(decoder), every, residue)
