"""Classic mistakes with stages, planted in the ranks: the shipped command catches each one and says where."""

from __future__ import annotations

import pytest

FAULTS = "tests.verify.faults.stage_faults"
SMALL = ("batch.micro_batch=2", "batch.accumulation=4", "data.sequence=32", "optimizer.eps=1e-5")
PP = ("layout.pp=2",)
INTERLEAVED = ("layout.pp=2", 'layout.pp_schedule="interleaved-1f1b"', "model.layers=4")
GRADIENT = "gradient before clipping"

# fault -> layout, step, microbatch, ranks, phase, part of the place, part of the note
FOUND = {
    "tie_not_summed": (PP, 1, None, {0, 1}, GRADIENT, "embedding.weight", ""),
    "divided_by_microbatches": (PP, 1, None, {0, 1}, GRADIENT, "", "0.25 × the right one"),
    "norm_of_own_stages": (PP, 1, None, {0, 1}, "norm", "global norm", ""),
    "documents_of_the_first_microbatch": (INTERLEAVED, 1, 1, {0, 1}, "forward", "blocks.", ""),
    "gradients_cleared_in_mid_step": (PP, 1, None, {0, 1}, GRADIENT, "", ""),
}
LONG = {"norm_of_own_stages", "gradients_cleared_in_mid_step", "documents_of_the_first_microbatch"}


def case(name):
    return pytest.param(name, marks=pytest.mark.long) if name in LONG else name


@pytest.mark.parametrize("fault", [case(name) for name in FOUND])
def test_a_fault_with_stages_is_caught_and_its_place_named(verb, score, fault):
    layout, step, microbatch, ranks, phase, place, note = FOUND[fault]
    code, document = verb(
        "equal", "--steps", "2", "--adversarial", fault=f"{FAULTS}:{fault}", sets=(*SMALL, *layout), world=2
    )
    score[fault] = code == 3
    assert (code, document["verdict"]) == (3, "fail")
    found = document["first_deviation"]
    assert found is not None
    assert (found["step"], found["microbatch"], found["phase"]) == (step, microbatch, phase), repr(found)
    assert found["rank"] in ranks
    assert place in found["place"] and note in found["note"], found


def test_stages_as_they_are_pass(verb, score):
    code, document = verb("equal", "--steps", "2", "--adversarial", sets=(*SMALL, *PP), world=2)
    score["clean pp"] = code == 0
    assert (code, document["verdict"]) == (0, "pass"), document["first_deviation"]
    assert document["worst_relative"] < 1e-12
