"""Widths that a Spec may leave out."""

from __future__ import annotations

import pytest

from fourfold.spec.model import DecoderSpec
from fourfold.spec.widths import default_ffn_width, ffn_width, head_width


@pytest.mark.parametrize(
    ("width", "ffn", "expected"),
    [(64, "swiglu", 192), (12, "swiglu", 32), (4096, "swiglu", 10944), (768, "gelu", 3072)],
)
def test_default_ffn_width(width: int, ffn: str, expected: int) -> None:
    assert default_ffn_width(width, ffn) == expected


def test_what_is_asked_wins() -> None:
    model = DecoderSpec(layers=1, width=64, heads=4)
    assert (ffn_width(model), head_width(model)) == (192, 16)
    asked = model.model_copy(update={"ffn_width": 65, "head_width": 6})
    assert (ffn_width(asked), head_width(asked)) == (65, 6)
