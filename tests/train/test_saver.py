"""When a run saves, and that a run which stops and goes on is the same run."""

from __future__ import annotations

import json
import subprocess

import pytest

from fourfold.checkpoint.choose import newest_valid
from fourfold.record.run_dir import RunDir
from tests.cli.test_train import FOURFOLD
from tests.train import saver_jobs
from tests.train.saver_jobs import (
    LONG_VALIDATION,
    checkpoints,
    kinds,
    live,
    newest,
    own_model,
    signalled,
    steps_of,
    stored,
    written,
)


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


def test_a_failure_in_the_warm_up_is_told_as_one(tmp_path):
    sets = own_model("Broken", f"run.dir={json.dumps(str(tmp_path / 'run'))}")
    done = subprocess.run(
        [*FOURFOLD, "train", "tiny", *(word for setting in sets for word in ("--set", setting))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    told = "rank 0 failed before its first step (warm-up: backward): ValueError: no gradient of this"
    assert told in done.stderr
    assert told in RunDir(tmp_path / "run").failures_md.read_text()


def test_a_signal_while_opening_or_in_the_warm_up_takes_one_step(ranks, tmp_path):
    assert ranks(2).run(saver_jobs.signalled_while_opening, str(tmp_path / "a")) == ["stopped"] * 2
    told = ranks(2).run(signalled, str(tmp_path / "b"), (), (0, "warm-up: forward"))
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


def test_how_a_run_is_watched_changes_nothing_in_it(ranks, tmp_path):
    """Not even for a model that draws random numbers in evaluation, or has running statistics."""
    often = ("checkpoint.every=1", "run.validate_every=1", "run.log_every=1")
    for name, sets in (("seldom", ("checkpoint.every=4",)), ("often", often)):
        ranks(2).run(live, str(tmp_path / name), own_model("Normed", *sets))
    assert stored(newest(tmp_path / "often")) == stored(newest(tmp_path / "seldom"))


def test_a_load_is_told_as_one_and_may_last(ranks, tmp_path):
    ranks(1).run(live, str(tmp_path), ("checkpoint.every=2",))
    [beats] = ranks(1).run(saver_jobs.beats_of_a_continuation, str(tmp_path), str(newest(tmp_path)))
    assert beats.count((0, "load", True)) == 1
    before = beats[: beats.index((0, "load", True))]
    assert {(step, phase) for step, phase, _ in before} == {(0, "warm-up: forward"), (0, "warm-up: backward")}
