"""Kinds of faults that were met elsewhere and stand in no other file: docs/faults.md says which is caught where."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from fourfold.launch.pool import RankPool
from tests.train import precision_jobs

STEP = "tests.verify.faults.kinds_step_faults"
LAYOUT = "tests.verify.faults.kinds_layout_faults"
MODELS = "tests.verify.faults.kinds_models"

# Two microbatches of each step, short rows, one pass at the gate's eps.
SMALL = ("data.sequence=32", "optimizer.eps=1e-5")
DDP = (*SMALL, "batch.micro_batch=2")
TP = (*SMALL, "batch.micro_batch=4", "layout.tp=2")
SP = (*TP, "layout.sp=true")
ZERO3 = (*DDP, "layout.dp_shard=2", "layout.zero=3")
BUCKETS = (*DDP, "layout.unused_parameters=true", "layout.bucket_mib=0.05")  # several from the first step on
CROSSED = (*SMALL, "batch.micro_batch=2", "layout.dp_replicate=2", *SP[3:])
AGAIN = (*DDP, "layout.recompute=full")
SOME_AGAIN = (*DDP, "layout.recompute=selective")
OWN = (
    *('model.kind="import"', 'data.kind="synthetic"', 'data.task="regression"'),
    *("data.inputs=4", "data.outputs=1", "data.samples=64", "optimizer.eps=1e-5"),
)
GRADIENT, OWN_GRADIENT = "gradient before clipping", "gradient before the reduction"


class Found(NamedTuple):
    """Where a fault is planted, and what the gate must say of it: one of the phases, part of the place and note."""

    sets: tuple[str, ...]
    phases: tuple[str, ...]
    place: str = ""
    note: str = ""
    step: int = 1


IN_STEP = {
    "divided_by_the_microbatches": Found(DDP, (GRADIENT,), note="0.5 × the right one"),
    "accumulated_scaled_each_time": Found(DDP, (GRADIENT,)),
    "wrapper_bypassed": Found(DDP, (GRADIENT,), note="it was not reduced"),
    "bucket_never_sent": Found(DDP, (GRADIENT,), note="it was not reduced"),
    "fullest_not_reduced": Found(DDP, (GRADIENT,), "embedding.weight", "it was not reduced"),
    "buffer_used_again_too_early": Found(BUCKETS, (GRADIENT,)),
    "rate_of_the_first_step": Found(DDP, ("update",), note="learning rate", step=2),
    "recomputed_with_other_draws": Found(AGAIN, ("backward",), "blocks.1"),
    "overwritten_before_recompute": Found(AGAIN, ("backward",), "blocks.1"),
    "kept_of_another_call": Found(SOME_AGAIN, ("backward", OWN_GRADIENT), "blocks.1"),
    "activation_slot_used_again": Found(DDP, ("backward", OWN_GRADIENT), "blocks.1"),
    "an_update_for_each_microbatch": Found(DDP, ("update",)),
    "betas_not_read": Found(
        (*DDP, "optimizer.betas=[0.5,0.6]"), ("update",), step=2
    ),  # the first update has no past
}
IN_LAYOUT = {
    "targets_shifted_in_each_slice": Found(SP, ("backward",), "head"),
    "doubled_by_a_group_of_one": Found(TP, (GRADIENT,)),
    "bias_shared_out_between_ranks": Found(TP, (OWN_GRADIENT, GRADIENT), "bias"),
    "backward_sums_equal_losses": Found(TP, ("backward",), "head"),
    "compared_in_place": Found(TP, ("clipped gradient",)),
    "untied_when_filled": Found(TP, (OWN_GRADIENT,), ".weight"),
    "tie_reduced_before_its_second_use": Found(ZERO3, (OWN_GRADIENT,), "embedding.weight"),
    "units_remembered_from_another_module": Found(TP, ("backward",), "attention_norm"),
}
# Of each kind of check one in every run of the tests, the others with the long matrices.
SHORT = {
    "accumulated_scaled_each_time",
    "fullest_not_reduced",
    "recomputed_with_other_draws",
    "betas_not_read",
    "bias_shared_out_between_ranks",
    "compared_in_place",
}


def cases(table):
    return [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in table]


def caught(verb, score, fault, planted, found, world=2, steps=2):
    code, document = verb("equal", "--steps", str(steps), fault=planted, sets=found.sets, world=world)
    score[fault] = code == 3
    assert (code, document["verdict"]) == (3, "fail")
    named = document["first_deviation"]
    assert named is not None, document["findings"]
    assert named["phase"] in found.phases, named
    assert found.place in named["place"] and found.note in named["note"], named
    assert named["step"] == found.step


@pytest.mark.parametrize("fault", cases(IN_STEP))
def test_a_kind_of_the_step_is_caught_and_its_place_named(verb, score, fault):
    caught(verb, score, fault, f"{STEP}:{fault}", IN_STEP[fault])


@pytest.mark.parametrize("fault", cases(IN_LAYOUT))
def test_a_kind_of_the_layout_is_caught_and_its_place_named(verb, score, fault):
    caught(verb, score, fault, f"{LAYOUT}:{fault}", IN_LAYOUT[fault])


@pytest.mark.long
def test_a_group_of_the_right_size_and_of_the_wrong_ranks_is_caught(verb, score):
    fault = "summed_over_another_group"
    caught(verb, score, fault, f"{LAYOUT}:{fault}", Found(CROSSED, (GRADIENT,)), world=4)


def model(name):
    return (*OWN, f'model.target="{MODELS}:{name}"')


@pytest.mark.parametrize("name", ["AuxiliaryOfTheMicrobatch", "AuxiliaryOfTheSample"])
def test_an_auxiliary_loss_that_depends_on_the_cut_is_caught(verb, score, name):
    if name == "AuxiliaryOfTheMicrobatch":
        found = Found(model(name), ("backward", "loss"))
        caught(verb, score, name, None, found)
        return
    code, document = verb("equal", "--steps", "2", sets=model(name))
    score[f"clean {name}"] = code == 0
    assert code == 0, document["first_deviation"]


def test_a_step_count_that_parameters_share_is_caught(verb, score):
    fault = "step_counter_shared"
    sets = (*model("EveryOtherStep"), "layout.unused_parameters=true")
    code, document = verb("equal", "--steps", "3", sets=sets)
    score["clean EveryOtherStep"] = code == 0
    assert code == 0, document["first_deviation"]
    caught(verb, score, fault, f"{STEP}:{fault}", Found(sets, ("update",), "second", step=3), steps=3)


@pytest.mark.parametrize("sets", [(), ("layout.tp=2",)], ids=["ddp", "tp"])
def test_metrics_that_count_what_ranks_hold_alike_end_the_run(score, tmp_path, sets):
    fault = "metrics_of_every_peer"
    with RankPool(2, timeout_s=60, setup=f"{LAYOUT}:{fault}") as pool:
        told = pool.run(precision_jobs.live, str(tmp_path), *sets)
    if not sets:  # each rank has samples of its own: there the same is right
        score[f"clean {fault}"] = told == ["finished"] * 2
        assert told == ["finished"] * 2
        return
    score[fault] = all("counted" in text for text in told)
    assert all("over" in text and "valid targets" in text and "counted" in text for text in told), told


@pytest.mark.parametrize(
    ("name", "sets", "planted"),
    [
        ("AGAIN", AGAIN, None),
        *(
            pytest.param(name, sets, None, marks=pytest.mark.long)
            for name, sets in (
                ("DDP", DDP),
                ("SOME_AGAIN", SOME_AGAIN),
                ("BUCKETS", BUCKETS),
                ("TP", TP),
                ("SP", SP),
                ("ZERO3", ZERO3),
            )
        ),
    ],
)
def test_clean_runs_pass(verb, score, name, sets, planted):
    code, document = verb("equal", "--steps", "2", fault=planted, sets=sets)
    score[f"clean {name}"] = code == 0
    assert (code, document["verdict"]) == (0, "pass"), document["first_deviation"]
    assert document["worst_relative"] < 1e-12


@pytest.mark.long
def test_a_clean_run_of_four_ranks_passes(verb, score):
    code, document = verb("equal", "--steps", "2", sets=CROSSED, world=4)
    score["clean CROSSED"] = code == 0
    assert code == 0, document["first_deviation"]
