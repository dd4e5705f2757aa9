"""Mistakes of experts in stages, planted in the ranks: the shipped command catches each one and says where."""

from __future__ import annotations

import pytest

FAULTS = "tests.verify.faults.expert_faults"
MOE = "model.moe={experts=4, top_k=2, shared_experts=1, expert_width=16"
SMALL = ("batch.micro_batch=2", "batch.accumulation=4", "data.sequence=32", "optimizer.eps=1e-5")
LOSS = (f"{MOE}, balance_weight=0.3}}",)
BIAS = (f"{MOE}, balance='bias', balance_speed=0.05}}",)
PP = ("layout.pp=2", *LOSS)
ZBV = ('layout.pp_schedule="zbv"', "model.layers=4", *PP)
DP = ("layout.pp=2", "layout.dp_replicate=2", "batch.micro_batch=1", *BIAS)

# fault -> layout, ranks in all, which of them may see it first, step, microbatch, phase, part of the place
FOUND = {
    "stages_without_the_factor": (PP, 2, {0}, 1, 0, "backward", "blocks.0.ffn_norm"),
    "factor_by_microbatches": (ZBV, 2, {0, 1}, 1, 0, "backward", "ffn_norm"),
    "auxiliary_of_the_last_stage_alone": (PP, 2, {0}, 1, 0, "backward", "blocks.0.ffn_norm"),
    "load_of_own_tokens_in_a_stage": (DP, 4, {0, 1, 2, 3}, 2, 0, "forward", "ffn.routed"),
}
LONG = {"auxiliary_of_the_last_stage_alone", "load_of_own_tokens_in_a_stage"}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in FOUND]
)
def test_a_fault_of_experts_in_stages_is_caught_and_its_place_named(verb, score, fault):
    layout, world, ranks, step, microbatch, phase, place = FOUND[fault]
    code, document = verb(
        "equal", "--steps", "2", fault=f"{FAULTS}:{fault}", sets=(*SMALL, *layout), world=world
    )
    score[fault] = code == 3
    assert (code, document["verdict"]) == (3, "fail")
    found = document["first_deviation"]
    assert found is not None
    assert (found["step"], found["microbatch"], found["phase"]) == (step, microbatch, phase), found
    assert found["rank"] in ranks and place in found["place"], found


@pytest.mark.parametrize("layout", [ZBV, pytest.param(DP, marks=pytest.mark.long)], ids=str)
def test_experts_in_stages_as_they_are_pass(verb, score, layout):
    code, document = verb(
        "equal", "--steps", "2", sets=(*SMALL, *layout), world=4 if "layout.dp_replicate=2" in layout else 2
    )
    score[f"clean {' '.join(layout)}"] = code == 0
    assert (code, document["verdict"]) == (0, "pass"), document["first_deviation"]
    assert document["worst_relative"] < 1e-12
