"""Names, shapes and cuts of a model's parameters, in the order in which `fourfold.models` makes them.

The tests hold every name, shape and cut to the built model and its sharding table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from fourfold.plan.parameters import positions
from fourfold.spec.model import DecoderSpec, MlpSpec, ModelSpec
from fourfold.spec.widths import expert_width, ffn_width, head_width, shared_width


@dataclass(frozen=True, slots=True)
class Shape:
    """One parameter. block: the index of the block it is in; None outside of the blocks; after: behind all of them.

    cut: the dim that tensor parallel cuts; None: whole on every rank. parts: equal parts along it that are never cut;
    with fewer parts than ranks it is whole on every rank. stack: dim 0 is that of routed experts, of which a token goes
    to `each`.
    """

    size: tuple[int, ...]
    block: int | None = None
    cut: int | None = None
    parts: int | None = None
    stack: bool = False
    after: bool = False
    each: int = 1

    @property
    def active(self) -> tuple[int, ...]:
        """What of it one token meets."""
        return (self.each, *self.size[1:]) if self.stack else self.size


def parameter_shapes(model: ModelSpec) -> Mapping[str, Shape] | None:
    """Every parameter by name, tied ones once; None for a model of which only the count is known, or not even that."""
    if isinstance(model, MlpSpec):
        return dict(_mlp(model))
    if isinstance(model, DecoderSpec) and model.mla is None and not model.mtp_layers:
        return dict(_decoder(model))
    return None


def _linear(
    name: str, inputs: int, outputs: int, bias: bool, block: int | None, rule: str, parts: int | None = None
) -> Iterator[tuple[str, Shape]]:
    """A Linear by its rule: "column" is cut over its outputs, "row" over its inputs, "replicate" not at all."""
    cut = {"column": 0, "row": 1, "replicate": None}[rule]
    yield f"{name}.weight", Shape((outputs, inputs), block, cut, parts)
    if bias:
        yield f"{name}.bias", Shape((outputs,), block, 0 if rule == "column" else None, parts)


def _norm(name: str, width: int, kind: str, block: int | None) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", Shape((width,), block)
    if kind == "layernorm":
        yield f"{name}.bias", Shape((width,), block)


def _decoder(model: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    width, biases = model.width, model.biases
    heads, kv = model.heads, model.kv_heads or model.heads
    features = head_width(model)
    yield "embedding.weight", Shape((model.vocabulary, width), None, 0)
    if model.positions != "rotary":
        yield "positions.weight", Shape((positions(model) // width, width))
    for index in range(model.layers):
        at = f"blocks.{index}"
        yield from _norm(f"{at}.attention_norm", width, model.norm, index)
        yield from _linear(
            f"{at}.attention.query", width, heads * features, biases, index, "column", parts=heads
        )
        for name in ("key", "value"):
            yield from _linear(
                f"{at}.attention.{name}", width, kv * features, biases, index, "column", parts=kv
            )
        yield from _linear(f"{at}.attention.output", heads * features, width, biases, index, "row")
        yield from _norm(f"{at}.ffn_norm", width, model.norm, index)
        if model.moe is None or index < model.moe.first_dense_layers:
            yield from _feed_forward(f"{at}.ffn", model, ffn_width(model), index)
            continue
        yield f"{at}.ffn.routed.router", Shape((model.moe.experts, width), index)
        stacks = _experts(f"{at}.ffn.routed.experts", model, model.moe.experts, index)
        yield from ((name, replace(shape, each=model.moe.top_k)) for name, shape in stacks)
        if model.moe.shared_experts:
            yield from _feed_forward(f"{at}.ffn.shared", model, shared_width(model), index)
    yield from ((name, replace(shape, after=True)) for name, shape in _norm("norm", width, model.norm, None))
    if not model.tied:
        yield "head.weight", Shape((model.vocabulary, width), None, 0, after=True)


def _feed_forward(at: str, model: DecoderSpec, hidden: int, block: int) -> Iterator[tuple[str, Shape]]:
    for name in ("gate", "up") if model.ffn == "swiglu" else ("up",):
        yield from _linear(f"{at}.{name}", model.width, hidden, model.biases, block, "column", parts=hidden)
    yield from _linear(f"{at}.down", hidden, model.width, model.biases, block, "row")


def _experts(at: str, model: DecoderSpec, experts: int, block: int) -> Iterator[tuple[str, Shape]]:
    """Stacks of routed experts; tensor parallel cuts their hidden features, if no rank has whole experts."""
    width, hidden = model.width, expert_width(model)
    for name in ("gate", "up") if model.ffn == "swiglu" else ("up",):
        yield f"{at}.{name}", Shape((experts, hidden, width), block, 1, stack=True)
        if model.biases:
            yield f"{at}.{name}_bias", Shape((experts, hidden), block, 1, stack=True)
    yield f"{at}.down", Shape((experts, width, hidden), block, 2, stack=True)
    if model.biases:
        yield f"{at}.down_bias", Shape((experts, width), block, stack=True)


def _mlp(model: MlpSpec) -> Iterator[tuple[str, Shape]]:
    widths = [model.inputs, *[model.hidden] * model.layers]
    for index, (before, after) in enumerate(pairwise(widths)):
        rule = "column" if index % 2 == 0 else "row"
        yield from _linear(f"layers.{index}", before, after, model.biases, index, rule)
    rule = "row" if model.layers % 2 else "replicate"
    output = _linear("output", model.hidden, model.outputs, model.biases, None, rule)
    yield from ((name, replace(shape, after=True)) for name, shape in output)
