"""Mixtures of experts in ranks against one device, in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import experts_jobs
from tests.parallel.one_device import DECODER, compare

TOLERANCE = 1e-12
MOE: dict[str, Any] = {
    "experts": 4,
    "top_k": 2,
    "shared_experts": 1,
    "expert_width": 8,
    "balance_weight": 0.3,
}
MIXTURE = DECODER | {"moe": MOE}
DROPPING = DECODER | {"moe": MOE | {"capacity_factor": 0.7, "router": "sigmoid", "first_dense_layers": 1}}


def equal(seen: list[Any]) -> bool:
    assert all(one.worst < TOLERANCE for one in seen), [one.gaps for one in seen]
    return True


@pytest.mark.parametrize("model", [MIXTURE, DROPPING], ids=["dropless", "dropping"])
@pytest.mark.parametrize(
    "layout",
    [
        {"dp_replicate": 2},
        {"dp_replicate": 1, "dp_shard": 2, "zero": 3},
        {"dp_replicate": 1, "tp": 2},
        {"dp_replicate": 1, "tp": 2, "sp": True},
    ],
    ids=str,
)
def test_experts_on_two_ranks(ranks, model, layout):
    assert equal(ranks(2).run(compare, model, layout))


@pytest.mark.parametrize("model", [MIXTURE, DROPPING], ids=["dropless", "dropping"])
@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 2, "zero": 1},
        {"dp_shard": 2, "zero": 3},
        {"tp": 2},
        {"tp": 2, "sp": True},
    ],
    ids=str,
)
def test_experts_that_lie_on_two_ranks(ranks, model, layout):
    seen = ranks(2).run(compare, model, {"dp_replicate": 1, "ep": 2} | layout)
    assert equal(seen)
    assert any("experts.down" in name for name in seen[0].cut)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 4, "ep": 2, "zero": 3},
        {"dp_shard": 4, "ep": 4, "zero": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 3},
        {"dp_shard": 2, "tp": 2, "ep": 2, "zero": 1},
        {"dp_shard": 2, "tp": 2, "ep": 4, "zero": 3, "sp": True},
        {"tp": 4, "ep": 2},
    ],
    ids=str,
)
def test_experts_that_lie_on_some_of_four_ranks(ranks, layout):
    assert equal(ranks(4).run(compare, MIXTURE, {"dp_replicate": 1} | layout))


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "zero": 3}, {"tp": 2, "sp": True}], ids=str)
def test_a_rank_whose_experts_nobody_chooses(ranks, layout):
    """One expert of four for every token: one rank has none of the tokens, and its experts have gradients of zeros."""
    alone = MIXTURE | {"moe": MOE | {"top_k": 1}}
    assert equal(ranks(2).run(experts_jobs.compare_crowded, alone, {"dp_replicate": 1, "ep": 2} | layout))


def test_experts_start_as_on_one_device_where_no_rank_holds_all(ranks):
    layout = {"dp_replicate": 1, "dp_shard": 2, "zero": 3, "ep": 2}
    assert equal(ranks(2).run(compare, MIXTURE, layout, 1, 1, 7, True, True))


def test_tokens_come_back_to_where_they_were(ranks):
    """What every expert gives back unchanged is what was sent, whatever goes where."""
    assert all(ranks(2).run(experts_jobs.there_and_back))


@pytest.mark.parametrize(
    ("experts", "said"), [(3, "layout.ep = 2 with blocks.0.ffn.routed.experts of 3"), (0, "no experts")]
)
def test_what_cannot_be_spread_is_refused(ranks, experts, said):
    for told in ranks(2).run(experts_jobs.refusal, experts):
        assert said in told


@pytest.mark.parametrize("degrees", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_the_norm_counts_each_expert_once(ranks, degrees):
    """By hand: on every rank one more of its box's elements, each known."""
    asked = {"dp_replicate": 1, "zero": 2, "ep": 2} | degrees
    for found, expected in ranks(4).run(experts_jobs.norm_of_ones, MIXTURE, asked):
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_stack_is_cut_where_it_divides(ranks):
    """Three experts on two ranks: their outputs are cut between them, not one and a half experts."""
    seen = ranks(2).run(
        compare, MIXTURE | {"moe": MOE | {"experts": 3}}, {"dp_replicate": 1, "dp_shard": 2, "zero": 1}
    )
    assert equal(seen)
    assert "blocks.0.ffn.routed.experts.up" in seen[0].cut


def test_tensor_parallel_cuts_every_expert(ranks):
    seen = ranks(2).run(compare, MIXTURE, {"dp_replicate": 1, "tp": 2})
    cut = {name.partition("experts.")[2] for name in seen[0].cut if "experts." in name}
    assert cut == {"gate", "gate_bias", "up", "up_bias", "down"}
    assert not any("router" in name for name in seen[0].cut)
