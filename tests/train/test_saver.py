"""When a run saves, what a save that fails means, and that a run which stops and goes on is the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.checkpoint.choose import newest_valid
from fourfold.checkpoint.validate import read_manifest
from fourfold.record.run_dir import RunDir
from tests.checkpoint.example import forge
from tests.train import rank_jobs, saver_jobs
from tests.train.saver_jobs import checkpoints, live, newest, own_model, signalled, stored, written

LONG_VALIDATION = (
    "data.samples=400",
    "data.validation_fraction=0.5",
    "run.validate_every=2",
    "model.dropout=0.2",
)
FULL = "No space left on device"


def kinds(folder: Path, rank: int, *wanted: str) -> list[tuple[str, int]]:
    return [(e["kind"], e["step"]) for e in rank_jobs.events(str(folder), rank) if e["kind"] in wanted]


def steps_of(folder: Path, what: str) -> list[int]:
    return [step for kind, step, _ in written(folder) if kind == what]


@pytest.mark.parametrize(
    ("sets", "saved"),
    [
        ((), []),
        (("checkpoint.every=2",), [2, 4, 5]),
        (("checkpoint.every=9",), [5]),
        (("checkpoint.every_s=1e9",), [5]),
        (("checkpoint.every=1", "checkpoint.keep_last=2"), [4, 5]),
        (("checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_every=2"), [2, 4, 5]),
    ],
)
def test_saves_are_by_steps_and_at_the_end_if_there_are_any(ranks, tmp_path, sets, saved):
    assert ranks(2).run(live, str(tmp_path), ("run.steps=5", *sets)) == ["finished"] * 2
    assert (checkpoints(tmp_path) if RunDir(tmp_path).checkpoints.exists() else []) == saved


def test_saves_are_by_rank_0s_clock_whichever_comes_first(ranks, tmp_path):
    keep = ("run.steps=12", "checkpoint.every_s=25.0", "checkpoint.keep_last=99")
    ended = ranks(2).run(saver_jobs.by_the_clock, str(tmp_path / "clock"), *keep)
    assert ended == ["finished"] * 2
    assert checkpoints(tmp_path / "clock") == [4, 8, 12]  # agreed before a forward, and saved after it
    ranks(2).run(saver_jobs.by_the_clock, str(tmp_path / "both"), *keep, "checkpoint.every=6")
    assert checkpoints(tmp_path / "both") == [4, 6, 10, 12]


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "update"])
def test_a_signal_in_a_step_saves_it_or_the_next_even_where_nothing_else_is_saved(ranks, tmp_path, phase):
    told = ranks(2).run(signalled, str(tmp_path), (), (2, phase))
    assert [ending for ending, _ in told] == ["stopped"] * 2
    [step] = checkpoints(tmp_path)
    assert step == (2 if phase == "data" else 3)
    for rank in (0, 1):
        assert kinds(tmp_path, rank, "step")[-1:] == [("step", step)]
        assert kinds(tmp_path, rank, "saved", "end") == [("saved", step), ("end", step)]
    assert newest_valid(RunDir(tmp_path).checkpoints).step == step
    assert steps_of(tmp_path, "loss") == list(range(1, step + 1))


def test_a_signal_while_opening_or_in_the_warm_up_takes_one_step(ranks, tmp_path):
    assert ranks(2).run(saver_jobs.signalled_while_opening, str(tmp_path / "a")) == ["stopped"] * 2
    told = ranks(2).run(signalled, str(tmp_path / "b"), (), (1, "forward"))  # the mock batch's
    assert [ending for ending, _ in told] == ["stopped"] * 2
    assert checkpoints(tmp_path / "a") == checkpoints(tmp_path / "b") == [1]


def test_a_signal_in_a_save_is_found_in_the_next_step(ranks, tmp_path):
    told = ranks(2).run(signalled, str(tmp_path), ("checkpoint.every=2",), (2, "save"))
    assert [ending for ending, _ in told] == ["stopped"] * 2
    assert checkpoints(tmp_path) == [2, 3]


def test_a_signal_in_the_last_step_or_its_save_finishes_the_run_if_nothing_is_left(ranks, tmp_path):
    none = ("data.validation_fraction=0.0", "checkpoint.every=2")
    for phase in ("data", "save"):
        told = ranks(2).run(signalled, str(tmp_path / phase), none, (4, phase))
        assert [ending for ending, _ in told] == ["finished"] * 2
        assert checkpoints(tmp_path / phase) == [2, 4]


def test_a_signal_before_the_last_validation_leaves_it_to_the_continuation(ranks, tmp_path):
    for phase in ("data", "save"):
        folder = tmp_path / phase
        told = ranks(2).run(signalled, str(folder), ("checkpoint.every=4", *LONG_VALIDATION), (4, phase))
        assert told == [("stopped", {2: 40, 4: 1})] * 2
        assert steps_of(folder, "validation") == [2]
        again = ranks(2).run(live, str(folder), ("checkpoint.every=4", *LONG_VALIDATION), str(newest(folder)))
        assert again == ["finished"] * 2
        assert steps_of(folder, "loss") == [1, 2, 3, 4]
        assert steps_of(folder, "validation") == [2, 4]


@pytest.mark.parametrize(("who", "every"), [(0, 0), (1, 0), (1, 2)])
def test_a_signal_in_a_validation_breaks_it_off_and_the_continuation_is_the_same_run(
    ranks, tmp_path, who, every
):
    sets = (*LONG_VALIDATION, f"checkpoint.every={every}", "run.log_every=3")
    told = ranks(2).run(signalled, str(tmp_path / "run"), sets, (2, "validation", who, 3))
    assert told == [("stopped", {2: 4})] * 2  # of 40: it is told with the batch, and known before the next
    assert checkpoints(tmp_path / "run") == [2]
    assert steps_of(tmp_path / "run", "loss") == [1, 2]
    assert steps_of(tmp_path / "run", "validation") == []
    assert kinds(tmp_path / "run", 1, "validation", "end") == [("end", 2)]
    always = (*sets, "checkpoint.every=2")
    ranks(2).run(live, str(tmp_path / "run"), always, str(newest(tmp_path / "run")))
    ranks(2).run(live, str(tmp_path / "undisturbed"), always)
    assert stored(newest(tmp_path / "run")) == stored(newest(tmp_path / "undisturbed"))
    assert sorted(written(tmp_path / "run")) == sorted(written(tmp_path / "undisturbed"))
    assert kinds(tmp_path / "run", 1, "validation") == [("validation", 2), ("validation", 4)]


def test_a_signal_in_the_first_validation_of_a_continuation_stops_it_where_it_was(ranks, tmp_path):
    ranks(2).run(signalled, str(tmp_path), LONG_VALIDATION, (2, "validation"))
    told = ranks(2).run(signalled, str(tmp_path), LONG_VALIDATION, (2, "validation"), str(newest(tmp_path)))
    assert told == [("stopped", {2: 2})] * 2
    assert checkpoints(tmp_path) == [2]
    assert steps_of(tmp_path, "loss") == [1, 2]


def test_a_finished_run_goes_on_to_the_same_end(ranks, tmp_path):
    sets = ("checkpoint.every=2", "run.validate_every=2")
    ranks(2).run(live, str(tmp_path), sets)
    before, files = written(tmp_path), stored(newest(tmp_path))
    assert steps_of(tmp_path, "validation") == [2, 4]
    for _ in range(2):
        assert ranks(2).run(live, str(tmp_path), sets, str(newest(tmp_path))) == ["finished"] * 2
        assert (written(tmp_path), stored(newest(tmp_path))) == (before, files)


def test_the_record_is_cut_back_exactly_and_only_if_it_is_the_one_that_was_saved(ranks, tmp_path):
    sets = ("checkpoint.every=2", "run.validate_every=1", "run.steps=5")
    ranks(1).run(live, str(tmp_path), sets)
    of_2 = min(RunDir(tmp_path).checkpoints.iterdir())
    state = json.loads((of_2 / "state.json").read_text())
    lines = RunDir(tmp_path).metrics.read_bytes().splitlines(keepends=True)
    kept = [json.loads(line)["step"] for line in lines[: state["metrics"]["lines"]]]
    assert kept == [1, 1, 2]  # not the validation after step 2
    assert state["metrics"]["bytes"] == sum(map(len, lines[:3]))
    RunDir(tmp_path).metrics.write_bytes(b"".join(lines[1:]))
    told = ranks(1).run(live, str(tmp_path), sets, str(of_2))[0]
    assert told.startswith("exit 5")
    assert "with the 3 lines" in told and "mv " in told
    assert RunDir(tmp_path).metrics.read_bytes() == b"".join(lines[1:])


def test_a_record_that_is_gone_begins_again(ranks, tmp_path):
    sets = ("checkpoint.every=2", "data.validation_fraction=0.0")
    ranks(1).run(live, str(tmp_path), sets)
    RunDir(tmp_path).metrics.unlink()
    of_2 = min(RunDir(tmp_path).checkpoints.iterdir())
    newest(tmp_path).rename(tmp_path / "aside")
    assert ranks(1).run(live, str(tmp_path), sets, str(of_2)) == ["finished"]
    assert steps_of(tmp_path, "loss") == [3, 4]
    assert "begins again after step 2" in RunDir(tmp_path).log.read_text()
    state = json.loads((newest(tmp_path) / "state.json").read_text())
    assert state["metrics"]["lines"] == 2


@pytest.mark.parametrize(
    ("who", "place"), [(0, "mkdir"), (0, "shard"), (1, "shard"), (0, "rename"), (0, "flush of the rename")]
)
def test_a_save_that_fails_in_mid_run_ends_it_and_the_last_good_one_stays(ranks, tmp_path, who, place):
    sets = ("checkpoint.every=2", "run.steps=8")
    told = ranks(2).run(saver_jobs.on_a_full_disk, str(tmp_path), sets, who, place, 4)
    for text in told:
        assert text.startswith("exit 5")
        assert FULL in text and f"rank {who}" in text
        assert "the run ends without a checkpoint of step 4" in text
    assert checkpoints(tmp_path) == [2]
    for rank in (0, 1):
        assert kinds(tmp_path, rank, "saved", "failure", "end") == [("saved", 2), ("failure", -1)]
    assert ranks(2).run(live, str(tmp_path), sets, str(newest(tmp_path))) == ["finished"] * 2
    assert checkpoints(tmp_path) == [4, 6, 8]


@pytest.mark.parametrize(("who", "place"), [(0, "flush of manifest.json"), (1, "flush of .safetensors")])
def test_a_run_that_may_go_on_says_so_and_saves_when_it_is_due_again(ranks, tmp_path, who, place):
    sets = ("checkpoint.every=2", "run.steps=6", 'checkpoint.on_error="go_on"')
    told = ranks(2).run(saver_jobs.on_a_full_disk, str(tmp_path / "run"), sets, who, place, 4)
    assert told == ["finished"] * 2
    assert checkpoints(tmp_path / "run") == [2, 6]
    for rank in (0, 1):
        events = kinds(tmp_path / "run", rank, "saved", "not_saved")
        assert events == [("saved", 2), ("not_saved", 4), ("saved", 6)]
    log = RunDir(tmp_path / "run").log.read_text()
    assert "step 4/6  not saved, and the run goes on" in log and FULL in log
    ranks(2).run(live, str(tmp_path / "undisturbed"), sets)
    assert stored(newest(tmp_path / "run")) == stored(newest(tmp_path / "undisturbed"))


def test_a_save_that_fails_for_a_signal_is_an_error_whatever_the_spec_says(ranks, tmp_path):
    sets = ("checkpoint.every=2", 'checkpoint.on_error="go_on"')
    told = ranks(2).run(saver_jobs.on_a_full_disk, str(tmp_path / "step"), sets, 1, "shard", 3, 3, "data")
    assert all(text.startswith("exit 5") and FULL in text for text in told)
    assert checkpoints(tmp_path / "step") == [2]
    sets = (*LONG_VALIDATION, 'checkpoint.on_error="go_on"')
    told = ranks(2).run(
        saver_jobs.on_a_full_disk, str(tmp_path / "validation"), sets, 0, "mkdir", 2, 2, "validation"
    )
    assert all(text.startswith("exit 5") and "without a checkpoint of step 2" in text for text in told)


def test_a_save_that_fails_after_the_last_step_is_an_error_whatever_the_spec_says(ranks, tmp_path):
    sets = ("checkpoint.every=2", 'checkpoint.on_error="go_on"')
    told = ranks(2).run(saver_jobs.on_a_full_disk, str(tmp_path), sets, 0, "rename", 4)
    assert all(text.startswith("exit 5") for text in told)
    assert checkpoints(tmp_path) == [2]


def test_only_what_all_ranks_are_told_alike_is_gone_on_from(ranks, tmp_path):
    """Data that one rank cannot read are no failed save: the others would wait for it."""
    sets = ("checkpoint.every=2", 'checkpoint.on_error="go_on"')
    assert "they are gone" in ranks(1).run(saver_jobs.with_data_lost, str(tmp_path), *sets)[0]
    assert kinds(tmp_path, 0, "not_saved") == []


def test_a_save_by_the_clock_that_failed_is_tried_again_when_that_time_has_passed_again(ranks, tmp_path):
    sets = ("run.steps=9", "checkpoint.every_s=25.0", 'checkpoint.on_error="go_on"')
    RunDir(tmp_path).checkpoints.write_text("a file in the folder's place")
    told = ranks(1).run(saver_jobs.by_the_clock, str(tmp_path), *sets)[0]
    assert told.startswith("exit 5")  # of the last
    assert kinds(tmp_path, 0, "not_saved") == [("not_saved", 4), ("not_saved", 8)]


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


def test_how_a_run_is_watched_changes_nothing_in_it(ranks, tmp_path):
    """Not even for a model that draws random numbers in evaluation, or has running statistics."""
    often = ("checkpoint.every=1", "run.validate_every=1", "run.log_every=1")
    for name, sets in (("seldom", ("checkpoint.every=4",)), ("often", often)):
        ranks(2).run(live, str(tmp_path / name), own_model("Normed", *sets))
    assert stored(newest(tmp_path / "often")) == stored(newest(tmp_path / "seldom"))


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


def test_a_load_is_told_as_one_and_may_last(ranks, tmp_path):
    ranks(1).run(live, str(tmp_path), ("checkpoint.every=2",))
    [beats] = ranks(1).run(saver_jobs.beats_of_a_continuation, str(tmp_path), str(newest(tmp_path)))
    assert beats.count((0, "load", True)) == 1
    before = beats[: beats.index((0, "load", True))]
    assert before and all(step == 1 for step, _, _ in before)  # the warm-up


@pytest.mark.parametrize("place", ["flush", "line"])
def test_a_record_that_cannot_be_flushed_is_a_save_that_failed_on_every_rank(ranks, tmp_path, place):
    sets = ("checkpoint.every=2", "run.steps=6", "run.log_every=9")
    on = (*sets, 'checkpoint.on_error="go_on"')
    ended = ranks(2).run(saver_jobs.on_a_full_record, str(tmp_path / "on"), on, place, 2)
    assert ended == ["finished"] * 2
    for rank in (0, 1):
        events = kinds(tmp_path / "on", rank, "saved", "not_saved")
        assert events == [("saved", 2), ("not_saved", 4), ("saved", 6)]
    assert steps_of(tmp_path / "on", "loss") == [1, 2, 3, 4, 5, 6]
    for text in ranks(2).run(saver_jobs.on_a_full_record, str(tmp_path / "stop"), sets, place, 2):
        assert text.startswith("exit 5") and FULL in text
        assert "the run ends without a checkpoint of step 4" in text


def test_nothing_of_pruning_ends_a_run(ranks, tmp_path):
    assert ranks(1).run(saver_jobs.with_pruning_refused, str(tmp_path)) == ["finished"]
    assert "note: not pruned: " in RunDir(tmp_path).log.read_text()


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
