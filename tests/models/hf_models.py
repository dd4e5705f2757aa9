"""Small models of transformers, by architecture: each of another kind of attention, norm, position or head."""

from __future__ import annotations

from typing import Any

from fourfold.models.huggingface import HuggingFaceKit
from fourfold.spec.model import HuggingFaceSpec

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,  # large enough for the loss to bend
}
GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 61,
    "n_positions": 32,
    "initializer_range": 0.3,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "scale_attn_by_inverse_layer_idx": True,
}
WINDOW = {"sliding_window": 3}
ARGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "attention_bias": True, "tie_word_embeddings": True},
    "mistral": {**SMALL, **WINDOW},
    "qwen2": SMALL,
    "qwen3": {**SMALL, "head_dim": 6},
    "gemma": {**SMALL, "head_dim": 6},
    "gemma3_text": {
        **SMALL,
        **WINDOW,
        "head_dim": 6,
        "query_pre_attn_scalar": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": GPT2,
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "phi": SMALL,
    "phi3": SMALL,
    "granite": {**SMALL, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "mixtral": {**SMALL, "num_local_experts": 4},
}


def spec_for(architecture: str, **more: Any) -> HuggingFaceSpec:
    args = {**ARGS.get(architecture, SMALL), **more}
    return HuggingFaceSpec(kind="huggingface", architecture=architecture, args=args)


def kit_for(architecture: str, **more: Any) -> HuggingFaceKit:
    return HuggingFaceKit(spec_for(architecture, **more))
