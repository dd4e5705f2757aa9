"""Classic mistakes of context parallel, planted in the ranks: the shipped command catches each one and says where."""

from __future__ import annotations

import pytest

FAULTS = "tests.verify.faults.context_faults"
SMALL = (
    "batch.micro_batch=2",
    "batch.accumulation=4",
    "data.sequence=32",
    "optimizer.eps=1e-5",
    "layout.cp=2",
)
GATHER, RING, ULYSSES = ((*SMALL, f'layout.cp_method="{m}"') for m in ("gather", "ring", "ulysses"))
GRADIENT = "gradient before clipping"

# fault -> settings, phase, place, part of the note
FOUND = {
    "targets_shifted_in_each_part": (GATHER, "batch", "targets", ""),
    "targets_shifted_twice": (GATHER, "batch", "targets", ""),
    "targets_cut_in_a_row": (RING, "batch", "targets", ""),
    "positions_of_the_part": (GATHER, "forward", "blocks.0.attention.output", ""),
    "masks_by_place_in_the_part": (RING, "forward", "blocks.0.attention.output", ""),
    "keys_without_their_gradient": (GATHER, "backward", "blocks.1.attention.value", ""),
    "gradients_left_on_the_next_rank": (RING, "backward", "blocks.1.attention.value", ""),
    "heads_home_in_another_order": ((*ULYSSES, "model.heads=4"), "forward", "blocks.0.attention.output", ""),
    "averaged_over_cp_too": (GATHER, GRADIENT, "", "0.5 × the right one"),
    "dropout_by_place_in_the_part": (ULYSSES, "forward", "blocks.0.attention_norm", ""),
}
QUICK = {
    "targets_shifted_in_each_part",
    "keys_without_their_gradient",
    "gradients_left_on_the_next_rank",
    "heads_home_in_another_order",
}


def case(name):
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.long)


@pytest.mark.parametrize("fault", [case(name) for name in FOUND])
def test_a_fault_of_context_parallel_is_caught_and_its_place_named(verb, score, fault):
    sets, phase, place, note = FOUND[fault]
    code, document = verb(
        "equal", "--steps", "2", "--adversarial", fault=f"{FAULTS}:{fault}", sets=sets, world=2
    )
    score[fault] = code == 3
    assert (code, document["verdict"]) == (3, "fail")
    found = document["first_deviation"]
    assert found is not None
    assert (found["step"], found["phase"], found["axis"]) == (1, phase, "cp" if phase == GRADIENT else ""), (
        found
    )
    assert found["place"] == (place or found["place"]) and note in found["note"], found


@pytest.mark.long
@pytest.mark.parametrize("sets", [GATHER, RING, ULYSSES], ids=["gather", "ring", "ulysses"])
def test_context_parallel_as_it_is_passes(verb, score, sets):
    code, document = verb("equal", "--steps", "2", "--adversarial", sets=sets, world=2)
    score[f"clean {sets[-1]}"] = code == 0
    assert (code, document["verdict"]) == (0, "pass"), document["first_deviation"]
    assert document["worst_relative"] < 1e-12
