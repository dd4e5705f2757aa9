"""Mistakes of mixtures of experts, planted in the ranks: the shipped command catches each one and says where."""

from __future__ import annotations

import pytest

FAULTS = "tests.verify.faults.expert_faults"
MOE = "model.moe={experts=4, top_k=2, shared_experts=1, expert_width=16"
SMALL = ("data.sequence=32", "optimizer.eps=1e-5", f"{MOE}, balance_weight=0.3}}")
BIAS = (f"{MOE}, balance='bias', balance_speed=0.05}}",)
DROPPING = (f"{MOE}, capacity_factor=0.6}}",)
DP = ("batch.micro_batch=2",)
EP = ("batch.micro_batch=2", "layout.dp_shard=2", "layout.zero=2", "layout.ep=2")
TP = ("batch.micro_batch=4", "layout.tp=2")
TP_EP = (*TP, "layout.sp=true", "layout.ep=2")
CP = ("batch.micro_batch=4", "layout.cp=2", "layout.dp_replicate=1")
GRADIENT = "gradient before clipping"

# fault -> layout, ranks, step, microbatch, phase, part of the place, axis, part of the note
FOUND = {
    "experts_counted_ep_times": (EP, 1, None, GRADIENT, ".experts.", "dp_shard", "it is 2 × the right one"),
    "norm_of_some_experts": (EP, 1, None, "norm", "global norm", "dp_shard", ""),
    "router_gradient_lost": (EP, 1, 0, "backward", "blocks.1.ffn_norm", "", ""),
    "auxiliary_lost": (DP, 1, 0, "backward", "blocks.1.ffn_norm", "", ""),
    "auxiliary_by_ranks": (DP, 1, 0, "backward", "blocks.1.ffn_norm", "", ""),
    "auxiliary_of_every_peer": (TP, 1, 0, "backward", "blocks.1.ffn_norm", "tp", ""),
    "auxiliary_of_the_microbatch": (DP, 1, 0, "backward", "blocks.1.ffn_norm", "", ""),
    "capacity_of_the_tokens_here": ((*CP, *DROPPING), 1, 0, "forward", "blocks.0.ffn.routed", "", ""),
    "tokens_returned_elsewhere": (TP_EP, 1, 0, "forward", "blocks.0.ffn.routed", "ep", ""),
    "load_of_one_rank": ((*DP, *BIAS), 2, 0, "forward", "ffn.routed", "", ""),
}

# Of each kind one in every run of the tests, the others with the long matrices.
LONG = {
    "auxiliary_by_ranks",
    "auxiliary_of_every_peer",
    "auxiliary_of_the_microbatch",
    "router_gradient_lost",
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in FOUND]
)
def test_a_fault_of_experts_is_caught_and_its_place_named(verb, score, fault):
    layout, step, microbatch, phase, place, axis, note = FOUND[fault]
    code, document = verb("equal", "--steps", "2", fault=f"{FAULTS}:{fault}", sets=(*SMALL, *layout))
    score[fault] = code == 3
    assert (code, document["verdict"]) == (3, "fail")
    found = document["first_deviation"]
    assert found is not None
    assert (found["step"], found["microbatch"], found["phase"], found["axis"]) == (
        step,
        microbatch,
        phase,
        axis,
    ), found
    assert place in found["place"] and note in found["note"], found


@pytest.mark.parametrize("layout", [EP, TP_EP, (*CP, *DROPPING)], ids=str)
def test_layouts_as_they_are_pass(verb, score, layout):
    code, document = verb("equal", "--steps", "2", sets=(*SMALL, *layout))
    score[f"clean {' '.join(layout)}"] = code == 0
    assert (code, document["verdict"]) == (0, "pass"), document["first_deviation"]
    assert document["worst_relative"] < 1e-12


def test_a_load_that_is_not_summed_shows_in_the_corrections(verb):
    code, document = verb(
        "equal", "--steps", "1", fault=f"{FAULTS}:load_of_one_rank", sets=(*SMALL, *DP, *BIAS)
    )
    assert code == 3
    failed = [f["claim"] for f in document["findings"] if f["verdict"] == "fail"]
    assert any("corrections" in claim for claim in failed), failed
