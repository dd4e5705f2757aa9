"""Counts of parameters, against published ones and against a list of every tensor's shape."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.plan.parameters import CORRECTION, count_parameters, parameter_terms
from fourfold.spec.errors import SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.model import DecoderSpec, ImportSpec, MlpSpec
from fourfold.spec.widths import default_ffn_width

unhurried = settings(deadline=None, max_examples=60)

# Totals of the released weights' tensors (the "safetensors" figure of each model's page on huggingface.co), but for
# GPT-2 (openai/gpt-2's "124M") and DeepSeek-V3, whose page counts more: see the last test.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_published_counts(name: str, published: int) -> None:
    model = load_spec(name).spec.model
    assert isinstance(model, DecoderSpec)
    assert model.mtp_layers == 0
    assert count_parameters(model) == published


def decoder(**changes: Any) -> DecoderSpec:
    return DecoderSpec(**{"layers": 2, "width": 8, "heads": 4, "vocabulary": 16, "ffn_width": 32} | changes)


def tensors(model: DecoderSpec) -> list[tuple[int, ...]]:
    """The shape of every tensor of a dense decoder, written out anew."""
    h, per_head = model.width, model.head_width or model.width // model.heads
    hidden = model.ffn_width or default_ffn_width(h, model.ffn)
    q, kv = model.heads * per_head, (model.kv_heads or model.heads) * per_head
    a_norm = [(h,)] * (2 if model.norm == "layernorm" else 1)
    linears = [(q, h), (kv, h), (kv, h), (h, q), (hidden, h), (h, hidden)]
    linears += [(hidden, h)] if model.ffn == "swiglu" else []
    block = [*a_norm, *a_norm, *linears]
    block += [(outputs,) for outputs, _ in linears] if model.biases else []
    rest = [(model.vocabulary, h), *a_norm]
    rest += [] if model.tied else [(model.vocabulary, h)]
    rest += [(model.max_sequence or 0, h)] if model.positions == "learned" else []
    return block * model.layers + rest


@unhurried
@given(
    st.builds(
        decoder,
        layers=st.integers(1, 4),
        width=st.sampled_from([8, 24]),
        kv_heads=st.sampled_from([None, 1, 2, 4]),
        head_width=st.sampled_from([None, 6]),
        ffn_width=st.sampled_from([None, 40]),
        tied=st.booleans(),
        biases=st.booleans(),
        norm=st.sampled_from(["rmsnorm", "layernorm"]),
        positions=st.sampled_from(["rotary", "learned"]),
        max_sequence=st.just(10),
        ffn=st.sampled_from(["swiglu", "gelu"]),
    )
)
def test_a_dense_decoder_is_the_sum_of_its_tensors(model: DecoderSpec) -> None:
    assert count_parameters(model) == sum(math.prod(shape) for shape in tensors(model))


def test_terms_leave_out_what_is_not_there() -> None:
    terms = parameter_terms(decoder(tied=True))
    assert terms == {
        "embedding": 16 * 8,
        "attention": 2 * 4 * 8 * 8,
        "norms": 5 * 8,
        "feed-forward": 2 * 3 * 8 * 32,
    }


def test_experts_with_biases() -> None:
    moe = {"experts": 4, "top_k": 2, "shared_experts": 2, "expert_width": 5, "first_dense_layers": 1}
    terms = parameter_terms(
        DecoderSpec.model_validate(decoder(biases=True, layers=3).model_dump() | {"moe": moe})
    )
    assert terms is not None
    assert terms["router"] == 2 * 8 * 4
    assert terms["routed experts"] == 2 * 4 * (2 * (8 * 5 + 5) + 5 * 8 + 8)
    assert terms["shared experts"] == 2 * (2 * (8 * 10 + 10) + 10 * 8 + 8)
    assert terms["feed-forward"] == 2 * (8 * 32 + 32) + 32 * 8 + 8
    assert CORRECTION not in terms


def test_more_dense_layers_than_layers() -> None:
    moe = {"experts": 4, "top_k": 2, "first_dense_layers": 9}
    model = DecoderSpec.model_validate(decoder().model_dump() | {"moe": moe})
    assert count_parameters(model) == count_parameters(decoder())


def test_latent_attention_without_a_query_rank() -> None:
    mla = {"kv_rank": 3, "nope_head_width": 4, "rope_head_width": 2, "value_head_width": 5}
    terms = parameter_terms(
        DecoderSpec.model_validate(decoder(layers=1, biases=True).model_dump() | {"mla": mla})
    )
    assert terms is not None
    queries, down, up, output = 8 * 4 * 6, 8 * 5 + 5 + 3, 3 * 4 * (4 + 5), 4 * 5 * 8 + 8
    assert terms["attention"] == queries + down + up + output


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (MlpSpec(kind="mlp"), (32 * 64 + 64) + (64 * 64 + 64) + (64 + 1)),
        (MlpSpec(kind="mlp", layers=1, biases=False, inputs=3, hidden=5, outputs=2), 3 * 5 + 5 * 2),
    ],
)
def test_mlp(model: MlpSpec, count: int) -> None:
    assert count_parameters(model) == count


def test_an_imported_model_is_not_guessed() -> None:
    model = ImportSpec(kind="import", target="package.module:factory")
    assert count_parameters(model) is None
    assert parameter_terms(model) is None


def test_learned_positions_need_a_length() -> None:
    with pytest.raises(SpecError, match=r"--set model\.max_sequence"):
        count_parameters(decoder(positions="learned"))


def test_deepseek_v3_as_published_with_its_prediction_module() -> None:
    """The page of the weights says 684,531,386,000 numbers. They are all accounted for: the main model, the module
    that predicts one token more (README_WEIGHTS.md: 11.5 B of its own), its copies of embedding and head, and one
    scale for each 128 × 128 block of the fp8 weights."""
    main = load_spec("deepseek-v3").spec.model
    assert isinstance(main, DecoderSpec)
    model = main.model_copy(update={"mtp_layers": 1})
    total = count_parameters(model)
    terms, main_terms = parameter_terms(model), parameter_terms(main)
    assert total is not None
    assert terms is not None
    assert main_terms is not None
    assert terms[CORRECTION] == 256 * 59
    assert main_terms[CORRECTION] == 256 * 58 == 14_848
    copies = 2 * 129_280 * 7168

    def blocks(rows: int, columns: int) -> int:
        return math.ceil(rows / 128) * math.ceil(columns / 128)

    attention = blocks(1536, 7168) + blocks(128 * 192, 1536) + blocks(576, 7168)
    attention += blocks(128 * 256, 512) + blocks(7168, 128 * 128)
    scales = 62 * attention + 3 * 3 * blocks(18432, 7168) + 59 * 257 * 3 * blocks(2048, 7168)
    assert total + copies + scales == 684_531_386_000
