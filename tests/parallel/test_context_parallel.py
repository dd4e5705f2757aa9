"""Rows cut between ranks: attention, dropout and the batch's own numbers are those of whole rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.parallel.context_parallel import runs_of
from fourfold.verify.measure import GRADIENT_TOLERANCE
from tests.parallel import context_jobs

METHODS = ("gather", "ring", "ulysses")


@given(st.integers(1, 9), st.integers(1, 6))
def test_runs_take_every_token_once_and_cost_causal_attention_the_same(ranks, chunk):
    length = 2 * ranks * chunk
    every = [runs_of(length, ranks, rank) for rank in range(ranks)]
    places = sorted(place for runs in every for run in runs for place in range(*run))
    assert places == list(range(length))
    costs = {sum(place + 1 for run in runs for place in range(*run)) for runs in every}
    assert len(costs) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("documents", [True, False], ids=["documents", "whole rows"])
def test_attention_over_cut_rows_is_that_of_one_device(ranks, method, documents):
    for heads, kv_heads in ((4, 4), (4, 2), (2, 1)):
        gaps = ranks(2).run(
            context_jobs.attention_gap, method, heads, kv_heads, 12, torch.float64, not documents
        )
        assert max(gaps) <= GRADIENT_TOLERANCE, (heads, kv_heads)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1)])
def test_attention_of_four_ranks(ranks, method, heads, kv_heads):
    gaps = ranks(4).run(context_jobs.attention_gap, method, heads, kv_heads, 24, torch.float64, False)
    assert max(gaps) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("method", METHODS)
def test_narrow_attention_is_as_near_as_its_dtype(ranks, method):
    gaps = ranks(2).run(context_jobs.attention_gap, method, 4, 2, 12, torch.bfloat16, False)
    assert max(gaps) <= 0.05
    assert max(ranks(2).run(context_jobs.attention_gap, method, 4, 2, 12, torch.float32, False)) <= 1e-5


def test_a_batch_is_cut_into_its_tokens_and_one_rank_speaks_for_padding(ranks):
    first, second = ranks(2).run(context_jobs.parts, 3, 8)
    assert first["places"] == [0, 1, 6, 7]
    assert second["places"] == [2, 3, 4, 5]
    assert (first["told"], second["told"]) == ((24, 7), (0, 0))
    assert first["valid"] + second["valid"] == first["valid_of_whole"]
    for part in (first, second):
        assert part["inputs"] == [[row * 8 + place for place in part["places"]] for row in range(3)]
        assert part["documents"] == [3, 8]


def test_dropout_of_a_part_is_the_part_of_the_whole_rows_dropout(ranks):
    assert all(ranks(2).run(context_jobs.same_draws))


@pytest.mark.parametrize(
    ("fault", "said"),
    [("blind", "does not attend by batch.context"), ("none", "")],
)
def test_a_model_that_does_not_look_beyond_its_own_tokens_is_refused(ranks, fault, said):
    for told in ranks(2).run(context_jobs.refusal, fault):
        assert said in told
        assert bool(told) == bool(said)
