"""Classic mistakes in sharding, planted in the ranks: the shipped command catches each one and says where."""

from __future__ import annotations

import pytest

FAULTS = "tests.verify.faults.layout_faults"

# Two microbatches of four rows, or of two where two ranks share the batch; short rows; one pass at the gate's eps.
SMALL = ("batch.micro_batch=4", "data.sequence=32", "optimizer.eps=1e-5")
ZERO1, ZERO2, ZERO3 = (("layout.dp_shard=2", f"layout.zero={stage}") for stage in (1, 2, 3))
HSDP = ("layout.dp_replicate=2", "layout.dp_shard=2", "layout.zero=2")
TP = ("layout.tp=2",)
SP = ("layout.tp=2", "layout.sp=true")
GRADIENT = "gradient before clipping"
OWN = "gradient before the reduction"

# fault -> layout, ranks, step, microbatch, rank, phase, part of the place, axis, part of the note
FOUND = {
    "norm_gradients_not_summed": (SP, 2, 1, None, {0, 1}, GRADIENT, "norm", "tp", "not summed over tp"),
    "replicated_counted_tp_times": (TP, 2, 1, None, {0, 1}, "norm", "global norm", "tp", ""),
    "shard_left_out_of_the_norm": (ZERO2, 2, 1, None, {0, 1}, "norm", "global norm", "dp_shard", ""),
    "dropout_by_place_in_the_slice": (SP, 2, 1, 0, {0, 1}, "forward", "blocks.0.attention_norm", "", ""),
    "kv_gradient_not_summed": (TP, 2, 1, 0, {0, 1}, "backward", "attention_norm", "tp", ""),
    "averaged_not_summed": (ZERO3, 2, 1, None, {0, 1}, GRADIENT, "", "dp_shard", "0.5 × the right one"),
    "not_synced_at_last": (ZERO1, 2, 1, None, {0, 1}, GRADIENT, "", "dp_shard", "not reduced"),
    "replicas_not_reduced": (HSDP, 4, 1, None, {0, 1, 2, 3}, GRADIENT, "", "dp_replicate×dp_shard", ""),
    "loss_of_every_peer": (TP, 2, 1, 0, {0, 1}, "backward", "head", "tp", ""),
    "targets_of_every_peer": (TP, 2, 1, None, {0, 1}, GRADIENT, "", "", "0.5 × the right one"),
    "bias_of_every_peer": (TP, 2, 1, None, {None}, OWN, "bias", "", ""),
    "unused_left_at_zero": (
        ZERO2,
        2,
        None,
        None,
        {0, 1},
        GRADIENT,
        "blocks.2",
        "dp_shard",
        "one device has none",
    ),
    "not_clipped_on_rank_1": (ZERO3, 2, 1, None, {1}, "clipped gradient", "", "", ""),
    "rows_of_other_ranks_looked_up": (SP, 2, 1, 0, {0, 1}, "forward", "embedding", "tp", ""),
    "every_shard_starts_alike": (ZERO3, 2, 1, 0, {0, 1}, "forward", "", "", ""),
    "one_shard_does_not_decay": (ZERO1, 2, 1, None, {1}, "update", "weight", "", ""),
}


# Of each kind one in every run of the tests, the others with the long matrices.
LONG = {
    "replicated_counted_tp_times",
    "replicas_not_reduced",
    "targets_of_every_peer",
    "loss_of_every_peer",
    "not_synced_at_last",
    "not_clipped_on_rank_1",
    "rows_of_other_ranks_looked_up",
    "one_shard_does_not_decay",
}


def case(name):
    return pytest.param(name, marks=pytest.mark.long) if name in LONG else name


@pytest.mark.parametrize("fault", [case(name) for name in FOUND])
def test_a_fault_in_a_layout_is_caught_and_its_place_named(verb, score, fault):
    layout, world, step, microbatch, ranks, phase, place, axis, note = FOUND[fault]
    sets = (*SMALL, *layout) if "layout.tp=2" in layout else (*SMALL, "batch.micro_batch=2", *layout)
    sets = (*sets, "batch.micro_batch=1") if world == 4 else sets
    code, document = verb(
        "equal", "--steps", "2", "--adversarial", fault=f"{FAULTS}:{fault}", sets=sets, world=world
    )
    score[fault] = code == 3
    assert (code, document["verdict"]) == (3, "fail")
    found = document["first_deviation"]
    assert found is not None
    assert step in (None, found["step"])
    assert (found["microbatch"], found["phase"], found["axis"]) == (microbatch, phase, axis), found
    assert found["rank"] in ranks
    assert place in found["place"] and note in found["note"], found


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        (SP, 2),
        (ZERO2, 2),
        *(pytest.param(*more, marks=pytest.mark.long) for more in ((TP, 2), (ZERO3, 2), (HSDP, 4))),
    ],
)
def test_layouts_as_they_are_pass(verb, score, layout, world):
    sets = (*SMALL, "batch.micro_batch=2", *layout)
    code, document = verb("equal", "--steps", "2", "--adversarial", sets=sets, world=world)
    score[f"clean {' '.join(layout)}"] = code == 0
    assert (code, document["verdict"]) == (0, "pass"), document["first_deviation"]
    assert document["worst_relative"] < 1e-12
    assert document["first_deviation"] is None
    assert any("frozen" in change for change in document["changes"])
