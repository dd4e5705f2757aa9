"""Mistakes of precision, planted in the ranks: the product's own loop ends, and says why; clean runs do not."""

from __future__ import annotations

import sys

import pytest

from fourfold.launch.pool import RankPool
from fourfold.spec.errors import RankFailed
from tests.train import precision_faults
from tests.train import precision_jobs as jobs

FAULTS = "tests.train.precision_faults"
# so high that some steps overflow
HIGH = ("precision.compute=fp16", f"precision.scale_start={2.0**26}", "run.steps=6")

# fault -> the run, what ends it
IN_RUN = {
    "masters_in_bf16": (("precision.compute=bf16",), "torch.bfloat16 in embedding.weight"),
    "frozen_cast_too": (("precision.compute=bf16",), "torch.float16 in embedding.weight"),
    "loss_in_bf16": (("precision.compute=bf16",), "the model's loss is torch.bfloat16"),
    "count_in_bf16": (("batch.micro_batch=3", "batch.global_batch=6", "data.sequence=129"), "counted"),
    "never_unscaled": (HIGH, "the same gradients under loss scales 16 and 8"),
    "clipped_before_unscaling": (HIGH, "after clipping at optimizer.clip_norm = 1"),
    "overflow_ignored": (HIGH, "an update on all of them or on none"),
    "skipped_in_silence": (HIGH, "a finite loss and gradient in step"),
}


@pytest.fixture(scope="module")
def score():
    caught: dict[str, bool] = {}
    yield caught
    clean = [name for name in caught if name.startswith("clean")]
    faults = [name for name in caught if name not in clean]
    print(
        f"\n{__name__}: planted faults caught {sum(caught[n] for n in faults)} of {len(faults)}, "
        f"clean runs passed {sum(caught[n] for n in clean)} of {len(clean)}",
        file=sys.__stdout__,
    )


@pytest.mark.parametrize("sets", sorted({sets for sets, _ in IN_RUN.values()}))
def test_a_clean_run_trains(ranks, score, tmp_path, sets):
    score[f"clean {sets}"] = ranks(1).run(jobs.live, str(tmp_path), *sets) == ["finished"]
    assert score[f"clean {sets}"]


@pytest.mark.parametrize("fault", IN_RUN)
def test_a_fault_ends_the_run_which_says_why(ranks, score, tmp_path, fault):
    sets, why = IN_RUN[fault]
    (told,) = ranks(1).run(precision_faults.run_with, fault, str(tmp_path), *sets)
    score[fault] = why in told
    assert why in told


def test_a_rank_that_decides_alone_is_found_out(score):
    """Where the global norm does not tell (each rank has a whole copy), the next line of metrics does."""
    with (
        pytest.raises(RankFailed) as caught,
        RankPool(2, timeout_s=60, setup=f"{FAULTS}:decided_alone") as pool,
    ):
        pool.run(jobs.copy_of_rank_1_overflows)
    told = str(caught.value)
    score["decided_alone"] = "1 of 2 ranks skipped" in told
    assert "1 of 2 ranks skipped" in told
    assert "one loss scale on all ranks in step 2" in told
