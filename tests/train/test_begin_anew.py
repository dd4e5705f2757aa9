"""`--resume auto` where a start was killed before anything was saved."""

from __future__ import annotations

import errno
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from fourfold.plan.run_plan import RunPlan
from fourfold.record.lock import locked
from fourfold.record.writer import JsonLines
from fourfold.spec.errors import DataError, SpecError
from fourfold.train import start
from fourfold.train.resume import chosen, reopen_run, resumed
from fourfold.train.start import begin, open_run
from tests.train import rank_jobs


def plan(run: Path, *sets: str) -> RunPlan:
    return rank_jobs.plan(1, f"run.dir={json.dumps(str(run))}", "checkpoint.every=2", *sets)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def note(path: Path, **line: object) -> None:
    with JsonLines(path) as lines:
        lines.write(line)


def test_a_run_that_saved_nothing_begins_anew_in_its_directory(tmp_path):
    asked = plan(tmp_path / "run")
    run = open_run(asked, "")
    note(run.metrics, step=1, loss=2.0)
    note(run.events(0), step=1, kind="step")
    going_on = resumed(asked, "auto")
    assert going_on is not None
    assert going_on.plan.resume_from is None
    assert going_on.told == f"begins anew in {run.path}: no checkpoint was saved yet"
    reopen_run(going_on.plan, run, going_on.choice)
    assert run.metrics.read_text() == ""  # step 1 is written again
    with pytest.raises(DataError, match="no checkpoint in it") as caught:
        resumed(asked, "must")
    assert "--resume auto" in caught.value.problems[0].instead
    with ExitStack() as held:
        begin(asked, "", going_on, held)
    assert " ".join(run.log.read_text().split()) == going_on.told


def test_an_empty_directory_is_begun_in_and_an_unfinished_claim_is_in_nobodys_way(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    assert resumed(plan(run), "auto") is None
    assert run.is_dir()  # nothing is touched by the question
    monkeypatch.setattr(start, "write_json", no_room)
    with pytest.raises(DataError, match="No space"):
        open_run(plan(run), "")
    assert list(run.iterdir()) == []
    monkeypatch.undo()
    assert open_run(plan(run), "").is_run
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    with pytest.raises(SpecError, match="used already"):
        open_run(plan(run), "")


def test_a_directory_of_somebody_elses_is_left_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("thesis.tex", "spec.toml", "spec.toml.bak"):
        (run / name).touch()
    with pytest.raises(DataError):
        resumed(plan(run), "auto")
    with pytest.raises(SpecError, match="used already"):
        open_run(plan(run), "")
    assert len(list(run.iterdir())) == 3


def test_nothing_is_begun_anew_that_would_be_lost_by_it(tmp_path):
    asked = plan(tmp_path / "run")
    run = open_run(asked, "")
    note(run.events(0), step=2, kind="saved", checkpoint="step-00000002")
    with pytest.raises(DataError, match="no checkpoint in it") as caught:  # somebody took it away
        resumed(asked, "auto")
    assert f"--set run.dir={tmp_path / 'run-1'}" in caught.value.problems[0].instead
    note(run.events(0), step=100, kind="end", ending="finished")
    with pytest.raises(DataError, match="no checkpoint in it"):
        resumed(asked, "auto")

    unsaved = plan(tmp_path / "unsaved", "checkpoint.every=0")
    run = open_run(unsaved, "")
    note(run.metrics, step=1, loss=2.0)
    assert resumed(unsaved, "auto") is not None  # killed, and nothing of it can be gone on with
    note(run.events(0), step=6, kind="end", ending="finished")
    for asked in (unsaved, plan(run.path, "checkpoint.every=4")):
        for word in ("auto", "must"):
            going_on = resumed(asked, word)
            assert going_on is not None and going_on.finished
            assert going_on.told.endswith(f"is finished: step {asked.steps} of {asked.steps}, nothing to do")

    damaged = plan(tmp_path / "damaged")
    run = open_run(damaged, "")
    (run.checkpoints / "step-00000002").mkdir(parents=True)
    with pytest.raises(DataError, match="step-00000002"):
        resumed(damaged, "auto")


def test_a_checkpoint_is_chosen_under_the_lock(tmp_path):
    run = open_run(plan(tmp_path / "run"), "")
    with locked(run), ExitStack() as held, pytest.raises(SpecError, match="another run is at work"):
        chosen(plan(run.path), "auto", held)
    with ExitStack() as held:
        assert chosen(plan(run.path), "auto", held) is not None
        with pytest.raises(SpecError, match="another run is at work"), locked(run):
            pass


def test_what_has_the_name_of_a_later_checkpoint_is_set_aside(tmp_path):
    asked = plan(tmp_path / "run")
    run = open_run(asked, "")
    going_on = resumed(asked, "auto")
    assert going_on is not None
    run.checkpoints.mkdir()
    (run.checkpoints / "step-00000002").write_text("a file")
    (run.checkpoints / "step-00000004").mkdir()
    (run.checkpoints / "notes").mkdir()
    reopen_run(going_on.plan, run, going_on.choice)
    assert not list(run.checkpoints.glob("step-*"))
    assert len(list(run.checkpoints.glob(".aside-step-*"))) == 2
    assert (run.checkpoints / "notes").is_dir()


def test_another_number_of_ranks_is_named_as_such_and_not_by_what_follows_from_it(tmp_path):
    run = open_run(plan(tmp_path / "run"), "")
    two = rank_jobs.plan(2, f"run.dir={json.dumps(str(run.path))}", "checkpoint.every=2")
    with pytest.raises(SpecError, match="it was started on 1") as caught:
        resumed(two, "auto")
    assert [problem.instead for problem in caught.value.problems] == ["--nproc 1"]
    with pytest.raises(DataError, match="nothing has that name"):
        resumed(plan(tmp_path / "nowhere"), "must")
