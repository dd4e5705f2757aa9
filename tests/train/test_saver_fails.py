"""What a save that fails means, and a disk that has no room for the record either."""

from __future__ import annotations

import pytest

from fourfold.record.run_dir import RunDir
from tests.train import rank_jobs, saver_jobs
from tests.train.saver_jobs import (
    LONG_VALIDATION,
    checkpoints,
    kinds,
    live,
    newest,
    steps_of,
    stored,
    written,
)

FULL = "No space left on device"


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


def test_events_are_on_disk_before_a_manifest_says_that_their_steps_are_done(ranks, tmp_path):
    of_rank = ranks(2).run(saver_jobs.flushed, str(tmp_path), "checkpoint.every=4")
    [published] = [at for name, at in of_rank[0] if "manifest.json" in name]
    for rank, found in enumerate(of_rank):
        for name in (f"rank{rank}.jsonl", *(["metrics.jsonl"] if rank == 0 else [])):
            assert [at for one, at in found if one == name and at < published], name


# What a line says that is not the hour, and how fast.
SAID = ("rank", "step", "kind", "sample_ids", "validation_loss", "checkpoint", "ending")
NO_ROOM = ("run.steps=8", "run.log_every=2", "checkpoint.every=4", 'checkpoint.on_error="go_on"')


def test_a_record_without_room_waits_in_memory_and_is_that_of_an_undisturbed_run(ranks, tmp_path):
    told = ranks(2).run(saver_jobs.without_room, str(tmp_path / "run"), NO_ROOM, 2, 4)
    ranks(2).run(live, str(tmp_path / "undisturbed"), NO_ROOM)
    for rank, (ending, said) in enumerate(told):
        assert ending == "finished"
        assert [f"rank{rank}.jsonl" in said[0], "metrics.jsonl" in said[-1]] == [True, rank == 0]
        assert len(said) == 2 - rank  # once for each file
        of_run, undisturbed = (
            [{key: event.get(key) for key in SAID} for event in rank_jobs.events(str(tmp_path / name), rank)]
            for name in ("run", "undisturbed")
        )
        assert of_run == undisturbed
        assert len([event for event in of_run if event["kind"] == "step"]) == 8
    assert written(tmp_path / "run") == written(tmp_path / "undisturbed")
    assert stored(newest(tmp_path / "run")) == stored(newest(tmp_path / "undisturbed"))


def test_without_room_a_save_has_failed_and_the_next_has_the_whole_record(ranks, tmp_path):
    told = ranks(2).run(saver_jobs.without_room, str(tmp_path), NO_ROOM, 3, 6)
    assert [ending for ending, _ in told] == ["finished"] * 2
    assert checkpoints(tmp_path) == [8]
    for rank in (0, 1):
        assert kinds(tmp_path, rank, "saved", "not_saved") == [("not_saved", 4), ("saved", 8)]
        assert [step for _, step in kinds(tmp_path, rank, "step")] == list(range(1, 9))
    assert steps_of(tmp_path, "loss") == list(range(1, 9))


@pytest.mark.parametrize(("sets", "last"), [(NO_ROOM, 99), (NO_ROOM[:3], 4)])
def test_without_room_at_the_end_or_where_it_shall_stop_a_run_ends(ranks, tmp_path, sets, last):
    for ending, _ in ranks(2).run(saver_jobs.without_room, str(tmp_path), sets, 2, last):
        assert ending.startswith("exit 5") and FULL in ending
