"""Tensor and sequence parallel against one device, in fp64, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.spec.errors import RankFailed
from tests.parallel import tensor_jobs
from tests.parallel.one_device import DECODER, MLP, compare

TOLERANCE = 1e-12


def tp(degree: int, sp: bool = False, **more: Any) -> dict[str, Any]:
    return {"dp_replicate": 1, "tp": degree, "sp": sp, **more}


def equal(seen: list[Any]) -> bool:
    assert all(one.worst < TOLERANCE for one in seen), [one.gaps for one in seen]
    return True


@pytest.mark.parametrize("sp", [False, True])
def test_the_decoder_with_odd_tokens_uneven_vocabulary_ties_and_biases(ranks, sp):
    seen = ranks(2).run(compare, DECODER, tp(2, sp))
    assert equal(seen)
    cut = {name.removeprefix("blocks.0.") for name in seen[0].cut if "blocks.1." not in name}
    assert cut == {"embedding.weight"} | {
        f"attention.{name}.{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")
    } | {f"ffn.{name}.{kind}" for name in ("gate", "up") for kind in ("weight", "bias")} | {
        "attention.output.weight",
        "ffn.down.weight",
    }


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_kv_heads_fewer_than_ranks_are_whole_and_their_gradients_summed(ranks, kv_heads, sp):
    seen = ranks(4).run(compare, DECODER | {"kv_heads": kv_heads}, tp(4, sp))
    assert equal(seen)
    assert not any("attention.key" in name for name in seen[0].cut)


@pytest.mark.parametrize(
    "change",
    [
        {"tied": False, "biases": False, "dropout": 0.0},
        {"positions": "learned", "norm": "layernorm", "ffn": "gelu"},
        {"vocabulary": 33, "width": 12, "heads": 2, "kv_heads": 2, "head_width": 4},
    ],
)
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_other_decoders(ranks, change, sp, packed):
    assert equal(ranks(2).run(compare, DECODER | change, tp(2, sp), 1, 2, 7, packed))


def test_a_rank_without_a_token(ranks):
    """Five tokens, and seven rows of the vocabulary, on four ranks are 2, 2, 1 and none, and 2, 2, 2 and one."""
    assert equal(ranks(4).run(compare, DECODER | {"kv_heads": 4, "vocabulary": 7}, tp(4, True), 1, 2, 5))


def test_a_rank_without_a_row_of_the_vocabulary_is_refused(ranks):
    text = ranks(4).run(tensor_jobs.refusal_of_decoder, {"vocabulary": 5}, tp(4))[0]
    assert "embedding.weight of 5 rows" in text
    assert "a vocabulary of 7" in text


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_the_perceptron(ranks, layers, task):
    seen = ranks(2).run(compare, MLP | {"layers": layers, "task": task}, tp(2))
    assert equal(seen)
    assert "layers.0.weight" in seen[0].cut


def test_frozen_parameters_stay_and_have_no_gradient(ranks):
    frozen = ("norm.weight", "blocks.0.ffn.up.weight", "blocks.1.attention.output.bias")
    seen = ranks(2).run(compare, DECODER, tp(2, True), 2, 2, 7, True, False, frozen)
    assert equal(seen)
    assert seen[0].without_gradient == tuple(sorted(frozen))


@pytest.mark.parametrize("sp", [False, True])
def test_a_users_column_that_stays_one_tensor_to_its_row(ranks, sp):
    assert equal(ranks(2).run(tensor_jobs.compare_own, "columns", tp(2, sp)))


@pytest.mark.parametrize("sp", [False, True])
def test_what_several_modules_take_is_gathered_once_and_its_gradient_summed_once(ranks, sp):
    """Per block: one before query, key and value, one before gate and up, one after each row; and the two ends."""
    forward, backward = ranks(2).run(tensor_jobs.collectives, tp(2, sp))[0]
    loss = 3  # maximum, sum and the target's logit, all-reduced
    if sp:
        assert forward == {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 5, "all_reduce": loss}
        assert backward == {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 5}
    else:
        assert forward == {"all_reduce": 5 + loss}
        assert backward == {"all_reduce": 5}


def test_a_model_that_cuts_nothing_is_refused(ranks):
    told = ranks(2).run(tensor_jobs.refusal, "replicated", tp(2))
    assert all("layout.tp = 2" in text and "cuts nothing" in text and "own_model.md" in text for text in told)


def test_every_dim_that_cannot_be_cut_is_refused_at_once(ranks):
    text = ranks(4).run(tensor_jobs.refusal, "odd", tp(4))[0]
    assert "up.weight of shape (6, 8)" in text
    assert "up.bias of shape (6,)" in text
    assert "down.weight of shape (8, 6)" in text
    assert "first.weight" not in text


def test_a_row_that_cannot_be_is_refused(ranks):
    text = ranks(2).run(tensor_jobs.refusal, "impossible", tp(2))[0]
    assert '"row" for down.bias' in text and '"down.bias": "replicate"' in text


def test_a_whole_module_between_heads_and_row_is_refused_by_name(ranks):
    told = ranks(2).run(tensor_jobs.refusal, "between", tp(2))
    assert all('"middle"' in text and "differs from rank to rank" in text for text in told)
    assert all('{"middle.*": "within heads"}' in text for text in told)


def test_what_is_within_heads_and_is_given_the_stream_is_refused(ranks):
    told = ranks(2).run(tensor_jobs.refusal, "not within", tp(2))
    assert all('"within heads" for "t"' in text and '{"t.*": "replicate"}' in text for text in told)


def test_a_gradient_that_is_not_summed_is_seen(ranks):
    """The measure of this file: without the sum over slices of the sequence every norm's gradient is a part."""
    seen = ranks(2).run(tensor_jobs.without_the_sum, tp(2, True))
    assert all(one.gaps["gradient"] > 1e-4 for one in seen)


def test_a_rank_that_fails_inside_a_backward_is_named(ranks):
    with pytest.raises(RankFailed, match="planted on rank 1"):
        ranks(2).run(tensor_jobs.fails_on_rank_1, tp(2))
