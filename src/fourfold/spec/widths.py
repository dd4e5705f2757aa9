"""Widths of a decoder that the Spec may leave out: features of one token."""

from __future__ import annotations

from fourfold.spec.model import DecoderSpec


def default_ffn_width(width: int, ffn: str = "swiglu") -> int:
    """Hidden features of a feed-forward where the Spec names none.

    swiglu: 8/3 × width, rounded up to a multiple of 32: its three matrices weigh as much as gelu's two (Shazeer,
    arXiv 2002.05202, section 2); gelu: 4 × width (arXiv 1706.03762, section 3.3).
    """
    if ffn == "gelu":
        return 4 * width
    return -(-8 * width // (3 * 32)) * 32


def ffn_width(model: DecoderSpec) -> int:
    """Hidden features of the dense feed-forward, asked or default."""
    return model.ffn_width or default_ffn_width(model.width, model.ffn)


def head_width(model: DecoderSpec) -> int:
    """Features of one attention head, asked or width / heads."""
    return model.head_width or model.width // model.heads


def expert_width(model: DecoderSpec) -> int:
    """Hidden features of one routed expert, asked or those of the dense feed-forward."""
    asked = None if model.moe is None else model.moe.expert_width
    return asked or ffn_width(model)


def shared_width(model: DecoderSpec) -> int:
    """Hidden features of all shared experts together, as one feed-forward; 0 where there are none."""
    return 0 if model.moe is None else model.moe.shared_experts * expert_width(model)
