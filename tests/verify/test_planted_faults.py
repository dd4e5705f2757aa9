"""Classic mistakes, planted in the ranks: each changes bits, and the shipped command catches it and says where."""

from __future__ import annotations

from contextlib import suppress

import pytest

from fourfold.launch.pool import RankPool
from fourfold.spec.errors import RankFailed
from tests.verify import rank_jobs

DATA = "tests.verify.faults.data_faults"
UNEVEN = 'data.packing="pad"'  # the command makes its targets uneven by itself; two bare steps must be given such data
STEP = "tests.verify.faults.step_faults"

# fault -> what the ledger must say of it (claims that must fail)
IN_DATA = {
    "same_samples_everywhere": ("no sample comes twice", "no sample is missing", "no two ranks share"),
    "unequal_seeds": ("no sample comes twice", "no sample is missing", "global batches are those of"),
    "epoch_not_advanced": ("the order changes between epochs",),
    "wrap_around": ("no sample comes twice",),
    "one_step_short": ("every rank takes the same number of steps", "no sample is missing"),
    "validation_on_every_rank": ("validation visits each sample exactly once",),
    "padding_counted": ("loss denominators",),
}

# fault -> step, microbatch, ranks, phase, part of the place, axis, part of the note
IN_STEP = {
    "backward_on_rank_0_only": (1, 0, {1}, "weight", "the loss", "", "did not run"),
    "mean_of_means": (1, 0, {0, 1}, "weight", "the loss", "", "global count"),
    "factor_missing": (
        1,
        None,
        {0, 1},
        "gradient before clipping",
        "",
        "dp_replicate",
        "0.5 × the right one",
    ),
    "never_synced": (1, None, {0, 1}, "gradient before clipping", "", "dp_replicate", "it was not reduced"),
    "last_microbatch_only": (
        1,
        None,
        {0, 1},
        "gradient before clipping",
        "",
        "dp_replicate",
        "earlier ones were lost",
    ),
    "clipped_before_reduction": (1, None, {0, 1}, "gradient before clipping", "", "dp_replicate", ""),
    "rate_off_by_one": (1, None, {0, 1}, "update", "", "", "learning rate"),
    "dropout_by_local_row": (1, 0, {1}, "forward", "blocks.0.attention_norm", "", "rows 0, 1"),
    "layer_unused_on_rank_1": (1, 0, {1}, "forward", "blocks.1.attention_norm", "", "did not run"),
    "everything_decays": (1, None, {0, 1}, "update", "norm.weight", "", ""),
    "clip_without_effect": (1, None, {0, 1}, "clipped gradient", "", "", ""),
    "norm_of_one_share": (1, None, {0, 1}, "norm", "global norm", "", ""),
    "nan_on_rank_1": (1, None, {1}, "gradient before clipping", "norm.weight", "dp_replicate", ""),
    "count_of_one_rank": (1, None, {0, 1}, "gradient before clipping", "", "dp_replicate", "× the right one"),
}


@pytest.fixture(scope="module")
def clean_bits(small):
    with RankPool(2, timeout_s=60) as pool:
        return (
            pool.run(rank_jobs.bits_of_reading, small(), 40),
            pool.run(rank_jobs.bits_of_steps, small(UNEVEN)),
        )


@pytest.mark.parametrize("last", ["drop", "keep"])
def test_reading_as_it_is_passes(verb, score, last):
    code, document = verb("coverage", sets=[f'data.last_batch="{last}"'])
    score[f"clean coverage {last}"] = code == 0
    assert (code, document["verdict"]) == (0, "pass")
    assert (document["duplicates"], document["missing"]) == (0, 0)


@pytest.mark.parametrize("fault", IN_DATA)
def test_a_fault_in_reading_is_caught(verb, score, small, clean_bits, fault):
    planted = f"{DATA}:{fault}"
    sets = ['data.last_batch="keep"'] if fault == "wrap_around" else []
    with RankPool(2, timeout_s=60, setup=planted) as pool:
        bits = pool.run(rank_jobs.bits_of_reading, small(*sets), 40)
    assert bits != clean_bits[0], "the fault changes nothing"
    code, document = verb("coverage", fault=planted, sets=sets)
    score[fault] = code == 3
    assert (code, document["verdict"]) == (3, "fail")
    failed = [f["claim"] for f in document["findings"] if f["verdict"] == "fail"]
    for claim in IN_DATA[fault]:
        assert any(claim in text for text in failed), failed


@pytest.mark.parametrize("unused", ["false", "true"])
def test_steps_as_they_are_pass(verb, score, unused):
    code, document = verb("equal", "--steps", "2", sets=[f"layout.unused_parameters={unused}"])
    score[f"clean equal {unused}"] = code == 0
    assert (code, document["verdict"]) == (0, "pass")
    assert document["worst_relative"] < 1e-12
    assert document["first_deviation"] is None


@pytest.mark.parametrize("fault", IN_STEP)
def test_a_fault_in_the_step_is_caught_and_its_place_named(verb, score, small, clean_bits, fault):
    planted = f"{STEP}:{fault}"
    with suppress(RankFailed), RankPool(2, timeout_s=60, setup=planted) as pool:
        bits = pool.run(rank_jobs.bits_of_steps, small(UNEVEN))
        assert bits != clean_bits[1], "the fault changes nothing"
    code, document = verb("equal", "--steps", "2", fault=planted)
    score[fault] = code == 3
    assert (code, document["verdict"]) == (3, "fail")
    named(document["first_deviation"], *IN_STEP[fault])


@pytest.mark.parametrize(
    ("fault", "place"),
    [("same_samples_everywhere", "rows and sample ids"), ("unequal_seeds", "rows and sample ids")],
)
def test_a_fault_in_reading_is_the_first_deviation_of_the_step(verb, score, fault, place):
    code, document = verb("equal", "--steps", "2", fault=f"{DATA}:{fault}")
    score[f"{fault}, by equality"] = code == 3
    assert code == 3
    named(document["first_deviation"], 1, 0, {1}, "batch", place, "", "")


def test_a_layer_unused_on_one_rank_is_named_where_nothing_refuses_it(verb, score):
    fault = "layer_unused_on_rank_1"
    code, document = verb(
        "equal", "--steps", "2", fault=f"{STEP}:{fault}", sets=["layout.unused_parameters=true"]
    )
    score[f"{fault}, unused allowed"] = code == 3
    assert code == 3
    named(document["first_deviation"], *IN_STEP[fault])


def named(found, step, microbatch, ranks, phase, place, axis, note):
    assert found is not None
    assert (found["step"], found["microbatch"], found["phase"], found["axis"]) == (
        step,
        microbatch,
        phase,
        axis,
    )
    assert found["rank"] in ranks
    assert place in found["place"]
    assert note in found["note"]
