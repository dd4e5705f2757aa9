from __future__ import annotations

import json
import math

import pytest

from fourfold.spec.errors import DataError
from fourfold.train.replay import replay
from tests.train import rank_jobs


def metrics(folder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_record(ranks, tmp_path):
    assert ranks(2).run(rank_jobs.whole_run, str(tmp_path), "run.validate_every=2") == ["finished"] * 2
    lines = metrics(tmp_path)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["loss_tokens"] == 8 for line in steps)
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4]
    for rank in (0, 1):
        events = rank_jobs.events(str(tmp_path), rank)
        assert [
            event["kind"] for event in events if event["kind"] not in ("step", "memory", "validation")
        ] == [
            "census",
            "start",
            "end",
        ]
        assert sum(len(event["sample_ids"]) for event in events if event["kind"] == "step") == 16
    assert "4/4" in (tmp_path / "log.txt").read_text()


def test_whatever_lasts_is_told_by_rank_0(ranks, tmp_path):
    sets = ("run.validate_every=2", "data.validation_fraction=0.3", "checkpoint.every=2")
    assert ranks(2).run(rank_jobs.told_run, str(tmp_path), *sets) == ["finished"] * 2
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0] == "before the first step: warm-up: forward"
    assert "step 1/4  forward" in lines  # a step of many microbatches, too
    validated = [line for line in lines if "validation: " in line]
    (samples,) = {
        event["validation_samples"]
        for event in rank_jobs.events(str(tmp_path), 0)
        if event["kind"] == "validation"
    }
    count = -(-samples // 4)  # two of a microbatch on each of two ranks
    assert count > 1
    assert validated == [
        f"step {step}/4  validation: batch {n + 1} of {count}" for step in (2, 4) for n in range(count)
    ]
    assert lines.count("step 2/4  save") > 2  # once for each tensor that rank 0 writes


def test_events_hold_the_epoch_of_every_step(ranks, tmp_path):
    ranks(1).run(rank_jobs.whole_run, str(tmp_path), "run.steps=6")
    steps = [event for event in rank_jobs.events(str(tmp_path), 0) if event["kind"] == "step"]
    assert [event["epoch"] for event in steps] == [0, 0, 0, 0, 0, 1]  # 40 samples, 8 in a step


def test_metrics_do_not_depend_on_the_logging_interval_or_the_world(ranks, tmp_path):
    seen = []
    for world, every in ((1, 1), (2, 3), (2, 100)):
        folder = tmp_path / f"{world}-{every}"
        folder.mkdir()
        ranks(world).run(rank_jobs.whole_run, str(folder), f"run.log_every={every}")
        seen.append([line["loss"] for line in metrics(folder) if "loss" in line])
    assert seen[1] == seen[2]
    assert seen[0] == pytest.approx(seen[1], rel=1e-12)


def test_rates_begin_with_the_first_step_and_leave_validation_out(ranks, tmp_path):
    told = ["restart", "step 0", "step 1", "leave out", "step 2", "leave out"]
    assert ranks(2).run(rank_jobs.clock_calls, str(tmp_path)) == [told] * 2


def test_a_signal_to_one_rank_ends_all_after_the_same_step(ranks, tmp_path):
    assert ranks(2).run(rank_jobs.stopped_run, str(tmp_path)) == [("stopped", 1)] * 2


def test_a_nan_stops_the_run_names_the_rank_and_leaves_a_bundle_that_replays(ranks, tmp_path):
    first, second = ranks(2).run(rank_jobs.run_with_nan, str(tmp_path))
    assert "step 3" in first
    assert "on rank 0" in second
    assert "fourfold replay" in first
    folder = tmp_path / "failures" / "step-000003-rank0"
    assert str(folder) in first
    assert not (tmp_path / "failures" / "step-000003-rank1").exists()
    document = replay(folder)
    assert document["reproduced"]
    assert "forward" in document["first_nonfinite"]
    assert document["step"] == 3
    assert all(math.isfinite(line["loss"]) for line in metrics(tmp_path))


def test_a_wrong_count_comes_again_and_a_changed_model_is_told(ranks, tmp_path, monkeypatch):
    assert "counted" in ranks(1).run(rank_jobs.bundle_of_a_miscounting_run, str(tmp_path))[0]
    folder = tmp_path / "failures" / "step-000001-rank0"
    document = replay(folder)
    assert document["reproduced"]
    assert [(row["targets"], row["valid_targets"]) for row in document["microbatches"]] == [(1, 2)] * 4
    monkeypatch.setattr(rank_jobs.Line.__init__, "__defaults__", (0, 2, False))
    with pytest.raises(DataError, match=r"linear\.bias has shape \(1,\) in the bundle, \(2,\) in the model"):
        replay(folder)


def test_a_bundle_that_is_none_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"bundle\.json"):
        replay(tmp_path)
    (tmp_path / "bundle.json").write_text('{"schema": "another/1"}')
    with pytest.raises(DataError):
        replay(tmp_path)


def test_the_mock_batch_leaves_nothing_behind(ranks):
    assert ranks(2).run(rank_jobs.warm_up_a_batch_norm) == [(True, True)] * 2
