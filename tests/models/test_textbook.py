"""The decoder against its mathematics, written out once more with plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fourfold.data.batch import Batch
from fourfold.models.decoder import Decoder, DecoderKit
from fourfold.spec.model import DecoderSpec

Make = Callable[..., Batch]
Build = Callable[..., Decoder]

GPT2 = DecoderSpec(
    layers=2,
    width=32,
    heads=4,
    vocabulary=61,
    tied=True,
    biases=True,
    norm="layernorm",
    positions="learned",
    max_sequence=64,
    ffn="gelu",
)
LLAMA = DecoderSpec(layers=2, width=32, heads=4, kv_heads=1, head_width=16, ffn_width=48, vocabulary=61)


def test_it_is_the_textbook_transformer(tokens: Make, built: Build) -> None:
    """Written out once more with plain loops over heads, softmax and all."""
    spec = LLAMA
    module, batch = built(spec), tokens([[6, 10]])
    state, documents = module.state_dict(), batch.documents
    assert documents is not None

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * state[name + ".weight"]

    def turned(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for t in range(16):
            for d in range(0, 16, 2):
                angle = t * spec.rope_theta ** (-d / 16)
                a, b = x[t, d], x[t, d + 1]
                out[t, d] = a * math.cos(angle) - b * math.sin(angle)
                out[t, d + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    x = state["embedding.weight"][batch.inputs[0]]
    place = torch.arange(16)
    seen = (place[:, None] >= place[None, :]) & (documents[0][:, None] == documents[0][None, :])
    for i in range(spec.layers):
        b = f"blocks.{i}."
        h = norm(x, b + "attention_norm")
        key = turned(h @ state[b + "attention.key.weight"].T)
        value = h @ state[b + "attention.value.weight"].T
        query = h @ state[b + "attention.query.weight"].T
        heads = []
        for head in range(4):
            scores = turned(query[:, head * 16 : head * 16 + 16]) @ key.T / 4
            heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value)
        x = x + torch.cat(heads, -1) @ state[b + "attention.output.weight"].T
        h = norm(x, b + "ffn_norm")
        gate, up = h @ state[b + "ffn.gate.weight"].T, h @ state[b + "ffn.up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ state[b + "ffn.down.weight"].T
    logits = norm(x, "norm") @ state["head.weight"].T
    torch.testing.assert_close(module(batch.inputs, documents)[0], logits, rtol=0, atol=1e-11)
    total, count = DecoderKit(spec).loss(module, batch)
    expected = -logits.log_softmax(-1)[torch.arange(16), batch.targets[0]][batch.valid[0]].sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    assert count == batch.valid.sum()


def test_it_is_the_textbook_gpt2(tokens: Make, built: Build) -> None:
    """LayerNorm, GELU's tanh form, places counted from each document's start, and biases everywhere."""
    module, batch = built(GPT2), tokens([[6, 10]])
    state, width = module.state_dict(), GPT2.width

    def norm(x: Tensor, name: str) -> Tensor:
        spread = (x.var(-1, correction=0, keepdim=True) + GPT2.norm_eps).sqrt()
        return (x - x.mean(-1, keepdim=True)) / spread * state[name + ".weight"] + state[name + ".bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[name + ".weight"].T + state[name + ".bias"]

    for first, last in ((0, 6), (6, 16)):
        place = torch.arange(last - first)
        x = state["embedding.weight"][batch.inputs[0, first:last]] + state["positions.weight"][place]
        for i in range(GPT2.layers):
            b = f"blocks.{i}."
            h = norm(x, b + "attention_norm")
            query, key, value = (
                linear(h, f"{b}attention.{part}").split(width // 4, -1) for part in ("query", "key", "value")
            )
            heads = []
            for q, k, v in zip(query, key, value, strict=True):
                scores = (q @ k.T / math.sqrt(width // 4)).masked_fill(place[:, None] < place, float("-inf"))
                heads.append(scores.softmax(-1) @ v)
            x = x + linear(torch.cat(heads, -1), b + "attention.output")
            h = linear(norm(x, b + "ffn_norm"), b + "ffn.up")
            h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            x = x + linear(h, b + "ffn.down")
        logits = norm(x, "norm") @ state["embedding.weight"].T
        torch.testing.assert_close(
            module(batch.inputs, batch.documents)[0, first:last], logits, rtol=0, atol=1e-11
        )


def test_grouped_queries_are_repeated_keys_and_values(tokens: Make, built: Build) -> None:
    grouped = built(LLAMA.model_copy(update={"kv_heads": 2, "biases": True}))
    full_spec = LLAMA.model_copy(update={"kv_heads": 4, "biases": True})
    full = DecoderKit(full_spec).build(0, torch.float64)
    values = grouped.state_dict()
    for name, value in values.items():
        if ".attention.key." in name or ".attention.value." in name:
            heads = value.view(2, 16, *value.shape[1:])
            values[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(values)
    batch = tokens([[10, 14]])
    torch.testing.assert_close(
        grouped(batch.inputs, batch.documents), full(batch.inputs, batch.documents), rtol=0, atol=1e-12
    )


def test_the_fused_kernel_agrees_with_torchs_own_unfused_one(tokens: Make, built: Build) -> None:
    module, batch = built(LLAMA), tokens([[10, 14]])
    fused = module(batch.inputs, batch.documents)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = module(batch.inputs, batch.documents)
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-12)
