"""Bytes by category by hand, for small shapes; that ranks really hold them is tested beside `parallel.bytes`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.state_bytes import (
    CATEGORIES,
    INSTANTS,
    beyond_textbook,
    engine_of,
    parts_of,
    rank_bytes,
    textbook,
)
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec

# A perceptron of 3 × 5 + 5, 5 × 5 + 5 and 5 × 1 + 1 parameters: 56.
SMALL = (
    'model={kind="mlp", inputs=3, hidden=5}',
    'data.kind="synthetic"',
    "batch.global_batch=16",
    "batch.micro_batch=2",
)


def spec(world: int, *sets: str) -> Spec:
    return settle(load_spec("tiny", [*SMALL, *sets]).spec, world)


def held(world: int, rank: int, *sets: str) -> dict[str, dict[str, int]]:
    """What is not 0, by instant."""
    found = rank_bytes(spec(world, *sets), rank)
    assert found is not None
    return {str(i): {str(c): n for c, n in each.items() if n} for i, each in found.items()}


def test_replicas_hold_gradients_and_their_buckets():
    assert held(2, 1) == {
        "after init": {"parameters": 224, "buffers": 224},
        "between microbatches": {
            "parameters": 224,
            "gradients": 224,
            "moments": 448,
            "buffers": 224,
            "other": 24,
        },
        "after the step": {"parameters": 224, "moments": 448, "buffers": 224, "other": 24},
    }


# In 2 shards of rows: 5 rows are 3 and 2, 1 row is 1 and 0. Padded: 3 × 3 + 3, 3 × 5 + 3, 1 × 5 + 1: 36.
@pytest.mark.parametrize(("rank", "own"), [(0, 36), (1, 56 - 36)])
def test_shards_are_padded_and_moments_are_not(rank, own):
    end = held(2, rank, "layout.zero=3")["after the step"]
    assert end == {"parameters": 4 * 36, "moments": 8 * own, "other": 24}


def test_each_stage_holds_more_between_microbatches():
    between = {zero: held(2, 0, f"layout.zero={zero}")["between microbatches"] for zero in (1, 2, 3)}
    common = {"parameters": 144, "moments": 288, "other": 24}
    last = 4 * 2 * (3 * 3 + 3)  # the first layer's gradient, whole and padded: it is reduced last
    assert between == {
        1: common | {"gathered": 288, "gradients": 224},
        2: common | {"gathered": 288, "gradients": 144, "buffers": last},
        3: common | {"gradients": 144, "buffers": last},
    }


def test_the_unit_that_is_reduced_last_depends_on_what_a_unit_is():
    def buffers(*sets: str) -> int:
        return held(2, 0, "layout.zero=3", *sets)["between microbatches"]["buffers"]

    both, all_of_it = 4 * 2 * (12 + 18), 4 * 2 * 36
    assert (buffers("layout.wrap=2"), buffers('layout.wrap="model"')) == (both, all_of_it)
    decoder = settle(load_spec("tiny", ["layout.zero=2"]).spec, 2)
    found = rank_bytes(decoder, 0)
    assert found is not None
    embedding, norm = 256 * 64, 64  # tied
    assert found["between microbatches"]["buffers"] == 4 * (embedding + norm)


def test_one_microbatch_has_nothing_between():
    assert list(held(1, 0, "batch.micro_batch=16")) == ["after init", "after the step"]
    assert held(1, 0, "batch.micro_batch=16")["after init"] == {"parameters": 224}


def test_dtypes():
    assert held(1, 0, 'precision.compute="fp64"')["after the step"]["moments"] == 2 * 8 * 56
    narrow = ('precision.compute="bf16"', 'precision.parameters="compute"', "layout.zero=1")
    between = held(2, 0, *narrow)["between microbatches"]
    assert (between["gathered"], between["gradients"]) == (2 * 72, 4 * 56)


def test_moments_on_disk_take_whole_lines_of_the_cache():
    end = held(1, 0, "layout.offload=disk")["after the step"]
    sizes = [60, 20, 100, 20, 20, 4]
    assert "moments" not in end
    assert end["on disk"] == sum(2 * -(-size // 64) * 64 for size in sizes)
    assert held(1, 0, "layout.offload=disk")["after init"]["on disk"] == end["on disk"]


def test_what_is_not_known_is_none():
    own = 'model={kind="import", target="a:b"}'
    asked = ("data.inputs=3", "data.outputs=1", 'data.task="regression"')
    assert rank_bytes(spec(2, own, *asked), 0) is None
    assert parts_of(spec(2, own, *asked), 0) is None


@given(
    shards=st.integers(1, 5),
    zero=st.integers(1, 3),
    width=st.sampled_from([8, 12, 20]),
    layers=st.integers(1, 3),
)
def test_shards_add_up_and_rank_0_holds_the_most(shards, zero, width, layers):
    sets = (f"model={{layers={layers}, width={width}, heads=2, vocabulary=257}}", f"layout.zero={zero}")
    asked = settle(load_spec("tiny", [*sets, f"batch.global_batch={4 * shards}"]).spec, shards)
    ranks = [rank_bytes(asked, rank) for rank in range(shards)]
    parts = [parts_of(asked, rank) for rank in range(shards)]
    whole = sum(part.whole for part in parts[0] or [])
    assert sum(part.own for rank in parts for part in rank or []) == whole
    for found in ranks:
        assert found is not None and ranks[0] is not None
        assert all(tuple(each) == CATEGORIES for each in found.values())
        for instant, each in found.items():
            assert all(each[c] <= ranks[0][instant][c] for c in CATEGORIES)
    assert sum((found or {})["after the step"]["moments"] for found in ranks) == 8 * whole


def test_tensor_parallel_keeps_heads_whole():
    sets = ("model={layers=1, width=8, heads=4, kv_heads=2}", "layout.tp=4", "batch.global_batch=8")
    parts = {p.whole for p in parts_of(settle(load_spec("tiny", sets).spec, 4), 0) or []}
    assert 4 * 8 in parts  # a key's two heads of two features each, on every rank
    assert 2 * 8 in parts  # one head of the query


def test_the_textbook():
    assert [textbook(zero, 64, mixed=True) for zero in range(4)] == pytest.approx(
        [16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64]
    )
    assert [textbook(zero, 4) for zero in range(4)] == [16, 10, 7, 4]
    assert [textbook(zero, 1, 8) for zero in range(4)] == [32] * 4


def test_every_engine_has_its_difference_told():
    asked = {
        "alone": spec(1),
        "ddp": spec(2),
        "replicate": spec(4, "layout.tp=2", "model.hidden=4"),
        "zero": spec(2, "layout.zero=2"),
    }
    assert {engine_of(each): each for each in asked.values()} == asked
    told = [
        beyond_textbook(each)
        for each in [*asked.values(), spec(2, "layout.zero=1"), spec(2, "layout.zero=3")]
    ]
    assert len(set(told)) == 5 and all(told)  # alone and replicate hold what the table says
    assert INSTANTS[0] == "after init"


# Stages of the perceptron: layers.0 (20 parameters); layers.1 and output (30 + 6). By cost (15, 25 + 5) one each.
def test_a_stage_holds_its_own():
    assert held(2, 0, "layout.pp=2") == {
        "after init": {"parameters": 4 * 20},
        "after the step": {"parameters": 4 * 20, "moments": 8 * 20, "other": 8},
    }
    assert held(2, 1, "layout.pp=2")["after init"] == {"parameters": 4 * 36}


def test_a_tied_head_is_held_by_both_ends():
    def parameters(rank: int, *sets: str) -> int:
        settled = settle(load_spec("tiny", ["model.tied=true", "layout.pp=2", *sets]).spec, 2)
        found = rank_bytes(settled, rank)
        assert found is not None
        return found["after init"]["parameters"]

    whole = rank_bytes(settle(load_spec("tiny", ["model.tied=true"]).spec, 1), 0)
    assert whole is not None
    twice = whole["after init"]["parameters"] + 4 * 256 * 64
    assert parameters(0) + parameters(1) == twice
    in_a_v = 'layout.pp_schedule="zbv"'
    assert parameters(0, in_a_v) + parameters(1, in_a_v) == twice
