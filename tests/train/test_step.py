from __future__ import annotations

import pytest
import torch

from fourfold.launch.pool import RankPool
from tests.train import rank_jobs


def close(a: object, b: object) -> bool:
    return torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-12, atol=1e-14)


@pytest.fixture(scope="module")
def one_device():
    with RankPool(1, timeout_s=60) as pool:
        yield pool.run(rank_jobs.few_steps, 4)[0]


@pytest.mark.parametrize(
    "sets", [(), ("batch.micro_batch=4",), ("batch.micro_batch=1",), ("data.workers=1",)]
)
def test_no_cut_of_the_global_batch_changes_a_step(ranks, one_device, sets):
    first, second = ranks(2).run(rank_jobs.few_steps, 4, *sets)
    for seen in (first, second):
        for what in ("loss", "norm", "rate"):
            assert close(seen[what], one_device[what])
        for name, values in one_device["parameters"].items():
            assert close(seen["parameters"][name], values), name
        assert close(seen["validation"][0], one_device["validation"][0])
        assert seen["validation"][1:] == one_device["validation"][1:] == (2, 2)
    for both, alone in zip(zip(first["ids"], second["ids"], strict=True), one_device["ids"], strict=True):
        assert sorted(both[0] + both[1]) == sorted(alone)


def test_the_partial_last_batch_counts_by_its_true_targets(ranks):
    sets = ("data.samples=37", 'data.last_batch="keep"', "run.steps=5")
    with RankPool(1, timeout_s=60) as pool:
        alone = pool.run(rank_jobs.few_steps, 5, *sets)[0]
    for seen in ranks(2).run(rank_jobs.few_steps, 5, *sets):
        assert close(seen["loss"], alone["loss"])
        assert close(seen["norm"], alone["norm"])


def test_clipping_acts_and_returns_the_norm_before_it(ranks):
    (free, _), (cut, _) = (
        ranks(2).run(rank_jobs.few_steps, 1, f"optimizer.clip_norm={norm}") for norm in (0.0, 1e-6)
    )
    assert close(free["norm"], cut["norm"])
    assert free["parameters"] != cut["parameters"]


def test_clipping_scales_to_the_bound_only_what_exceeds_it(ranks):
    for bound, expected in ((0.0, 1.0), (1e9, 1.0), (1e-3, None)):
        for seen in ranks(2).run(rank_jobs.one_update, f"optimizer.clip_norm={bound}"):
            factor = expected or 1e-3 / seen["norm"]
            assert seen["factors"] == pytest.approx([factor] * len(seen["factors"]), rel=1e-9)


def test_an_update_takes_the_rate_of_its_own_step_and_leaves_no_gradient(ranks):
    # The second of four steps, cosine from 1 to 0.1 over three intervals: 0.1 + 0.9 x (1 + cos 60 degrees) / 2.
    for seen in ranks(2).run(rank_jobs.one_update, "optimizer.lr=1.0"):
        assert seen["rate"] == pytest.approx(0.775)
        assert seen["left"] == 0


def test_gradients_are_reduced_once_however_many_microbatches_there_are(ranks):
    for seen in ranks(2).run(rank_jobs.one_update, "batch.micro_batch=1"):
        assert seen["microbatches"] == 4
        assert seen["reductions"] == [0]


def test_a_layer_that_took_no_part_is_named_in_the_step_itself(ranks):
    for text in ranks(2).run(rank_jobs.idle_layer):
        assert "idle.weight" in text
        assert "layout.unused_parameters=true" in text


def test_the_loss_is_summed_in_fp64_whatever_the_run_computes_in(ranks):
    assert ranks(2).run(rank_jobs.one_update, "precision.compute=fp32")[0]["loss_dtype"] is torch.float64


@pytest.mark.parametrize("who", [0, 1])
def test_the_wish_of_one_rank_to_stop_is_known_to_all_in_the_same_step(ranks, who):
    assert ranks(2).run(rank_jobs.wish_to_stop, who) == [[False, True, False]] * 2


def test_a_rank_with_a_nonfinite_loss_is_named_and_the_others_only_follow(ranks):
    (text0, secondary0), (text1, secondary1) = ranks(2).run(rank_jobs.nonfinite, "loss")
    assert "on rank 1" in text0
    assert "on rank 1" in text1
    assert (secondary0, secondary1) == (True, False)


def test_an_overflow_in_backward_is_nobodys_loss(ranks):
    for text, secondary in ranks(2).run(rank_jobs.nonfinite, "gradient"):
        assert "overflowed in backward" in text
        assert not secondary
    assert ranks(2).run(rank_jobs.nonfinite, "nowhere") == [("", False)] * 2


def test_a_loss_over_other_targets_than_the_batches_is_refused(ranks):
    for text in ranks(2).run(rank_jobs.wrong_count):
        assert "over 4 valid targets" in text
        assert "counted 3" in text


def test_bf16_computes_in_bf16_and_keeps_fp32(ranks):
    wide, narrow = (
        ranks(2).run(rank_jobs.few_steps, 3, f"precision.compute={compute}")[0]
        for compute in ("fp32", "bf16")
    )
    assert narrow["loss"] != wide["loss"]
    assert narrow["loss"] == pytest.approx(wide["loss"], rel=0.05)
    moved = [value for values in narrow["parameters"].values() for value in values]
    # Some of them are no bf16 numbers: parameters are kept, and updated, in fp32.
    assert any(torch.tensor(value).bfloat16().item() != value for value in moved)
