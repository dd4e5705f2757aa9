"""The decoder: a transformer of pre-normalised blocks, grouped-query attention and a gated feed-forward.

Letters: B rows, T tokens, V vocabulary.
Sources: GPT-2 (Radford et al. 2019, section 2.3: pre-normalisation, output projections scaled by depth);
Llama (arXiv 2302.13971, section 2.2: RMSNorm, SwiGLU, rotary positions).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.collectives.context import Context
from fourfold.models.attention import Attention, Cached, Shared, attend, mask_between
from fourfold.models.carried import noted
from fourfold.models.draws import Draws, draw_key
from fourfold.models.initial import Embedding, Linear, fill
from fourfold.models.loss import cross_entropy
from fourfold.models.mixture import Routed
from fourfold.models.protocol import BatchLike, Heads, Rule, Start
from fourfold.models.routing import Rows
from fourfold.plan.parameters import positions as position_parameters
from fourfold.spec.model import DecoderSpec, MoeSpec
from fourfold.spec.widths import ffn_width, head_width, shared_width


def _norm(spec: DecoderSpec) -> nn.Module:
    """Both compute in fp32 or wider: narrower input is widened inside torch's kernels."""
    if spec.norm == "layernorm":
        return nn.LayerNorm(spec.width, eps=spec.norm_eps)
    return nn.RMSNorm(spec.width, eps=spec.norm_eps)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202) or GELU in GPT-2's tanh form (arXiv 1606.08415)."""

    def __init__(self, name: str, spec: DecoderSpec, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.output_key = draw_key(f"{name}.down")
        self.gate = Linear(spec.width, hidden, bias=spec.biases) if spec.ffn == "swiglu" else None
        self.up = Linear(spec.width, hidden, bias=spec.biases)
        self.down = Linear(hidden, spec.width, bias=spec.biases)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        if self.gate is None:
            hidden = F.gelu(self.up(x), approximate="tanh")
        else:
            hidden = F.silu(self.gate(x)) * self.up(x)
        return shared.dropout(self.down(hidden), self.dropout, self.output_key)


class Mixture(nn.Module):
    """Routed experts in place of a feed-forward, and shared ones, which every token goes to, as one feed-forward."""

    def __init__(self, name: str, spec: DecoderSpec, moe: MoeSpec) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.output_key = draw_key(name)
        self.routed = Routed(spec, moe)
        hidden = shared_width(spec)
        self.shared = FeedForward(f"{name}.shared", spec, hidden, dropout=0.0) if hidden else None

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        y = self.routed(x, shared.rows)
        if self.shared is not None:
            y = y + self.shared(x, shared)
        return shared.dropout(y, self.dropout, self.output_key)


class Block(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the stream."""

    def __init__(self, index: int, spec: DecoderSpec) -> None:
        super().__init__()
        name = f"blocks.{index}"
        self.attention_norm = _norm(spec)
        self.attention = Attention(
            f"{name}.attention",
            width=spec.width,
            heads=spec.heads,
            kv_heads=spec.kv_heads or spec.heads,
            head_width=head_width(spec),
            biases=spec.biases,
            dropout=spec.dropout,
        )
        self.ffn_norm = _norm(spec)
        self.ffn: nn.Module
        if spec.moe is None or index < spec.moe.first_dense_layers:
            self.ffn = FeedForward(f"{name}.ffn", spec, ffn_width(spec), spec.dropout)
        else:
            self.ffn = Mixture(f"{name}.ffn", spec, spec.moe)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        x = x + self.attention(self.attention_norm(x), shared)
        return x + self.ffn(self.ffn_norm(x), shared)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Tokens to logits. A stage of a pipeline has None in the place of blocks that it lacks."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.rotary = spec.positions == "rotary"
        self.cached = Cached(head_width(spec), spec.rope_theta)
        self.embedding = Embedding(spec.vocabulary, spec.width)
        self.positions = (
            None if self.rotary else Embedding(position_parameters(spec) // spec.width, spec.width)
        )
        self.blocks = nn.ModuleList(Block(index, spec) for index in range(spec.layers))
        self.norm = _norm(spec)
        self.head = Linear(spec.width, spec.vocabulary, bias=False)
        if spec.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        draws: Draws | None = None,
        context: Context | None = None,
        stream: Tensor | None = None,
        rows: Rows | None = None,
    ) -> Tensor:
        """int64 [B, T] -> logits [B, T, V], or the stream where the last blocks are not here.

        documents  int32 [B, T]: attention stays inside a document; None = every earlier token is seen
        draws      of dropout; None = none
        context    `tokens` are a part of each row, and so are the logits: [B, t, V]; `documents` are those of all
        stream     [B, T, width] of the blocks before these; None = these are the first
        rows       what experts need to know of whole rows; None = every token is live, and nothing is balanced
        """
        x = self._entered(tokens, documents, context) if stream is None else stream
        turns = (
            self.cached.turns(tokens.shape[1] if context is None else context.length, x)
            if self.rotary
            else None
        )
        if turns is not None and context is not None:
            turns = context.here(turns, 0)
        shared = Shared(
            self._attend(documents, context, tokens.device, _compute_dtype(x)), turns, draws, rows
        )
        if stream is None:
            x = shared.dropout(x, self.dropout, "embedding")
        for block in self.blocks:
            x = x if block is None else block(x, shared)
        given: Tensor = x if self.head is None else self.head(self.norm(x))
        return given

    def _entered(self, tokens: Tensor, documents: Tensor | None, context: Context | None) -> Tensor:
        """[B, T] -> what the first block takes, before dropout: [B, T, width]."""
        x: Tensor = self.embedding(tokens)
        if self.positions is None:
            return x
        places = places_in(tokens.shape[1] if context is None else context.length, documents, tokens.device)
        table: Tensor = self.positions(places if context is None else context.here(places, -1))
        return x + table

    def _attend(
        self, documents: Tensor | None, context: Context | None, device: torch.device, dtype: torch.dtype
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """How every layer attends."""
        if context is None:
            mask = None if documents is None else self.cached.mask(documents, dtype)
            return lambda query, key, value: attend(query, key, value, mask)

        def between(rows: Tensor, columns: Tensor) -> Tensor:
            return mask_between(documents, rows.to(device), columns.to(device), dtype)

        return lambda query, key, value: context.attend(query, key, value, between)


class DecoderKit:
    """The decoder as a `ModelKit`.

    attend_across  documents packed into one row see each other
    """

    def __init__(self, spec: DecoderSpec, attend_across: bool = False) -> None:
        self._spec = spec
        self._attend_across = attend_across

    def build(self, seed: int, dtype: torch.dtype) -> Decoder:
        """See `ModelKit.build`."""
        module = Decoder(self._spec)
        fill(module, self.start, seed, dtype)
        return module

    def skeleton(self, dtype: torch.dtype) -> Decoder:
        """See `BoxedKit.skeleton`."""
        with torch.device("meta"):
            module = Decoder(self._spec).to(dtype)
        return with_corrections(module, dtype)

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        """See `ModelKit.loss`; dropout only while `module.training`."""
        rows = self._rows(batch)
        return self._lost(self._forward(module, batch, None, rows), batch, rows)

    def part(
        self, module: nn.Module, batch: BatchLike, stream: Tensor | None, last: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `StagedKit.part`."""
        rows = self._rows(batch)
        given = self._forward(module, batch, stream, rows)
        return self._lost(given, batch, rows) if last else given

    def _rows(self, batch: BatchLike) -> Rows | None:
        return None if self._spec.moe is None else Rows.of(batch)

    def _forward(
        self, module: nn.Module, batch: BatchLike, stream: Tensor | None, rows: Rows | None
    ) -> Tensor:
        dropping = module.training and self._spec.dropout > 0
        draws = Draws(batch.seed, batch.step, batch.rows, batch.context) if dropping else None
        documents = None if self._attend_across else batch.documents
        given: Tensor = module(batch.inputs, documents, draws, batch.context, stream, rows)
        return given

    def _lost(self, logits: Tensor, batch: BatchLike, rows: Rows | None) -> tuple[Tensor, Tensor]:
        total, count = cross_entropy(logits, batch.targets, batch.valid)
        return total if rows is None else noted(total, rows.weight), count

    def ends(self, module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:  # noqa: ARG002
        """See `StagedKit.ends`."""
        learned = self._spec.positions == "learned"
        return ("embedding", "positions") if learned else ("embedding",), ("norm", "head")

    def stream(self, batch: BatchLike) -> tuple[int, ...]:
        """See `StagedKit.stream`."""
        return (*batch.inputs.shape, self._spec.width)

    def sharding(self) -> dict[str, Rule]:
        """See `ModelKit.sharding`."""
        spec, hidden = self._spec, ffn_width(self._spec)
        dense = spec.layers if spec.moe is None else spec.moe.first_dense_layers
        table: dict[str, Rule] = {
            "embedding.weight": "vocabulary",
            "blocks.*.attention_norm.*": "replicate",
            "blocks.*.attention.query.*": Heads(spec.heads),
            "blocks.*.attention.key.*": Heads(spec.kv_heads or spec.heads),
            "blocks.*.attention.value.*": Heads(spec.kv_heads or spec.heads),
            "blocks.*.attention.output.weight": "row",
            "blocks.*.ffn_norm.*": "replicate",
            "norm.*": "replicate",
            "head.weight": "vocabulary",
        }
        if spec.positions == "learned":
            table["positions.weight"] = "replicate"
        if spec.biases:
            table["blocks.*.attention.output.bias"] = "replicate"
        if dense:
            table |= _feed_forward("blocks.*.ffn", spec, hidden)
        if spec.moe is not None:
            table |= _experts("blocks.*.ffn.routed", spec)
            if spec.moe.shared_experts:
                table |= _feed_forward("blocks.*.ffn.shared", spec, shared_width(spec))
        return table

    def blocks(self, module: nn.Module) -> tuple[str, ...]:
        """See `ModelKit.blocks`."""
        return tuple(name for name, child in module.named_modules() if isinstance(child, Block))

    def start(self, name: str) -> Start:
        """See `BoxedKit.start`."""
        if name.endswith("norm.weight"):
            return Start(1.0, 0.0)
        if name.endswith("bias"):
            return Start(0.0, 0.0)
        # Two sums per layer enter the residual stream, so its variance grows with 2 × layers.
        onto_stream = name.endswith(("output.weight", "down.weight", "experts.down"))
        share = 1 / math.sqrt(2 * self._spec.layers) if onto_stream else 1.0
        return Start(0.0, self._spec.init_std * share)


def with_corrections(module: Decoder, dtype: torch.dtype) -> Decoder:
    """`module`, made on the meta device, with values of its routers' corrections, for they are no parameters."""
    for child in module.modules():
        if isinstance(child, Routed) and child.correction is not None:
            child.begin_anew(dtype)
    return module


def _feed_forward(at: str, spec: DecoderSpec, hidden: int) -> dict[str, Rule]:
    """The sharding of a feed-forward."""
    table: dict[str, Rule] = {f"{at}.up.*": Heads(hidden), f"{at}.down.weight": "row"}
    if spec.ffn == "swiglu":
        table[f"{at}.gate.*"] = Heads(hidden)
    if spec.biases:
        table[f"{at}.down.bias"] = "replicate"
    return table


def _experts(at: str, spec: DecoderSpec) -> dict[str, Rule]:
    """The sharding of routed experts and of their router."""
    table: dict[str, Rule] = {f"{at}.router": "replicate", f"{at}.experts.down": "expert row"}
    names = ("gate", "up") if spec.ffn == "swiglu" else ("up",)
    table |= {f"{at}.experts.{name}": "expert column" for name in names}
    if spec.biases:
        table |= {f"{at}.experts.{name}_bias": "expert column" for name in names}
        table[f"{at}.experts.down_bias"] = "expert"
    return table


def places_in(length: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Each token's place: in its document, so that it does not matter where a document is packed, or in its row."""
    place = torch.arange(length, device=device)
    if documents is None:
        return place
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return place - torch.cummax(place * first, dim=1).values


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What autocast will make of the attention's inputs, so that it does not convert the mask in every layer."""
    kind = x.device.type
    narrowed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if narrowed else x.dtype
