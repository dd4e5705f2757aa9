"""What a checkpoint of a run holds, what of it comes back, and which one is refused."""

from __future__ import annotations

import json

import pytest

from fourfold.checkpoint.validate import read_manifest
from fourfold.record.run_dir import RunDir
from tests.checkpoint.example import forge
from tests.train import rank_jobs, saver_jobs
from tests.train.saver_jobs import checkpoints, live, newest, own_model, signalled, stored, written


def test_running_statistics_streams_and_buffers_of_every_kind_come_back(ranks, tmp_path):
    """Statistics are each rank's own between two steps; one buffer is none of `state_dict`, one of gloo's dtypes."""
    sets = own_model("Normed", "checkpoint.every=2", "run.steps=6", "run.validate_every=2")
    ranks(2).run(live, str(tmp_path / "undisturbed"), sets)
    assert {"model.steps", "model.odd", "model.norm.running_mean"} <= set(
        read_manifest(newest(tmp_path / "undisturbed")).tensors
    )
    told = ranks(2).run(signalled, str(tmp_path / "run"), sets, (3, "data"))
    assert [ending for ending, _ in told] == ["stopped"] * 2
    assert checkpoints(tmp_path / "run") == [2, 3]
    assert ranks(2).run(live, str(tmp_path / "run"), sets, str(newest(tmp_path / "run"))) == ["finished"] * 2
    assert stored(newest(tmp_path / "run")) == stored(newest(tmp_path / "undisturbed"))
    assert sorted(written(tmp_path / "run")) == sorted(written(tmp_path / "undisturbed"))


def test_a_part_that_was_added_begins_anew_and_one_that_was_taken_away_is_left_out(ranks, tmp_path):
    sets = own_model("Growing", "checkpoint.every=2")
    ranks(2).run(live, str(tmp_path), sets)
    of_2 = str(min(RunDir(tmp_path).checkpoints.iterdir()))
    newest(tmp_path).rename(tmp_path / "aside")
    text = ranks(2).run(saver_jobs.live_grown, str(tmp_path), sets, of_2)[0]
    assert text.startswith("exit 5")
    assert "tensor model.second.bias: missing from the checkpoint" in text
    assert "tensor optimizer.first.weight.exp_avg: in the checkpoint but not wanted" in text
    assert """--set 'checkpoint.allow_missing=["model.second.bias"]'""" in text
    leave = (
        *sets,
        'checkpoint.allow_missing=["model.second.*"]',
        'checkpoint.allow_surplus=["model.first.*", "model.third.*"]',
    )
    assert ranks(2).run(saver_jobs.live_grown, str(tmp_path), leave, of_2) == ["finished"] * 2
    [event] = [e for e in rank_jobs.events(str(tmp_path), 1) if e["kind"] == "allowed"]
    assert event["initial"] == ["model.second.bias", "model.second.weight"]
    slots = ("exp_avg", "exp_avg_sq", "step")
    assert event["left_out"] == [
        *("model.first.bias", "model.first.weight"),
        *(f"optimizer.first.{part}.{slot}" for part in ("bias", "weight") for slot in slots),
    ]
    assert event["unused"] == ["checkpoint.allow_surplus: model.third.*"]
    log = RunDir(tmp_path).log.read_text()
    assert "model.second.bias: not in the checkpoint, and begins as in a new run" in log
    assert "checkpoint.allow_surplus: model.third.*: matches no tensor" in log
    assert "the last batch's loss was not held against the saved one" in log
    after = stored(newest(tmp_path))
    steps = {name: data for name, data in after.items() if name.endswith(".step ()")}
    assert steps["optimizer.body.bias.step ()"] != steps["optimizer.second.bias.step ()"]  # 4 steps, and 2
    assert not any("first" in name for name in after)


def test_a_parameter_that_took_part_in_no_step_has_no_moments_afterwards_either(ranks, tmp_path):
    sets = rank_jobs.line("model.args.idle=true", "layout.unused_parameters=true", "checkpoint.every=2")
    ranks(2).run(live, str(tmp_path), sets)
    of_2 = min(RunDir(tmp_path).checkpoints.iterdir())
    before = stored(newest(tmp_path))
    newest(tmp_path).rename(tmp_path / "aside")
    assert ranks(2).run(live, str(tmp_path), sets, str(of_2)) == ["finished"] * 2
    assert stored(newest(tmp_path)) == before
    assert not any(name.startswith("optimizer.idle") for name in before)


def test_moments_that_are_lost_are_missed(ranks, tmp_path):
    """Also where every file and the manifest are whole: they were never saved."""
    ranks(1).run(live, str(tmp_path), ("checkpoint.every=2",))
    lost = [name for name in read_manifest(newest(tmp_path)).tensors if name.startswith("optimizer.")]
    forge(newest(tmp_path), lambda body: [body["tensors"].pop(name) for name in lost])
    text = ranks(1).run(live, str(tmp_path), (), str(newest(tmp_path)))[0]
    assert text.startswith("exit 5")
    assert all(f"tensor {name}: missing from the checkpoint" in text for name in lost)
    some = 'checkpoint.allow_missing=["optimizer.*"]'
    assert ranks(1).run(live, str(tmp_path), (some,), str(newest(tmp_path))) == ["finished"]


def test_a_state_of_another_kind_is_refused(ranks, tmp_path):
    ranks(1).run(live, str(tmp_path), ("checkpoint.every=2",))
    state = json.loads((newest(tmp_path) / "state.json").read_text())
    del state["metrics"]
    (newest(tmp_path) / "state.json").write_text(json.dumps({**state, "scale": 1.0}))
    forge(newest(tmp_path), lambda body: body)
    text = ranks(1).run(live, str(tmp_path), (), str(newest(tmp_path)))[0]
    assert text.startswith("exit 5")
    assert "metrics: Field required; scale: Extra inputs" in text


@pytest.mark.parametrize("key", ["probe_loss", "spec"])
def test_a_state_that_was_changed_and_sealed_again_is_damage(ranks, tmp_path, key):
    ranks(1).run(live, str(tmp_path), ("checkpoint.every=2",))
    state = json.loads((newest(tmp_path) / "state.json").read_text())
    state[key] = {"probe_loss": "0xzz", "spec": {"name": 1}}[key]
    (newest(tmp_path) / "state.json").write_text(json.dumps(state))
    forge(newest(tmp_path), lambda body: body)
    text = ranks(1).run(live, str(tmp_path), (), str(newest(tmp_path)))[0]
    assert text.startswith("exit 5")
    assert "state.json" in text and f"found: {key}: " in text


def test_a_checkpoint_of_another_run_is_refused_by_every_rank_before_the_record_is_touched(ranks, tmp_path):
    sets = ("checkpoint.every=2", "run.steps=4", "run.seed=7", "optimizer.lr=0.5")
    ranks(2).run(live, str(tmp_path / "a"), sets[:2])
    ranks(2).run(live, str(tmp_path / "b"), sets)
    record = RunDir(tmp_path / "b").metrics.read_bytes()
    theirs = min(RunDir(tmp_path / "a").checkpoints.iterdir())
    for text in ranks(2).run(live, str(tmp_path / "b"), (*sets, "checkpoint.keep_last=9"), str(theirs)):
        assert text.startswith("exit 5")
        assert "under run.seed = 7" in text and "under optimizer.lr = 0.5" in text
        assert f"mv {theirs} somewhere else, out of ckpt/" in text
        assert "keep_last" not in text
    assert RunDir(tmp_path / "b").metrics.read_bytes() == record


def test_state_that_is_no_tensor_is_told_before_the_first_step(ranks, tmp_path):
    ranks(1).run(live, str(tmp_path), own_model("Extra"))
    assert "note: line keep state that is no tensor" in RunDir(tmp_path).log.read_text()


def test_an_optimizer_with_state_that_is_not_known_is_refused_by_name(ranks):
    text = ranks(1).run(saver_jobs.unknown_state_of_the_optimizer)[0]
    assert "max_exp_avg_sq" in text


def test_other_data_and_another_world_are_refused(ranks, tmp_path):
    sets = ("checkpoint.every=2",)
    ranks(1).run(live, str(tmp_path), sets)
    texts = ranks(2).run(live, str(tmp_path), sets, str(newest(tmp_path)))
    assert all("--nproc 1" in text for text in texts)
    forge(newest(tmp_path), lambda body: body.update(data_hash="0" * 32))
    text = ranks(1).run(live, str(tmp_path), sets, str(newest(tmp_path)))[0]
    assert text.startswith("exit 5")
    assert "in a run over other data" in text
