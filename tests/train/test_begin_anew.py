"""`--resume auto` where a start was killed before anything was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.plan.run_plan import RunPlan
from fourfold.record.writer import JsonLines
from fourfold.spec.errors import DataError
from fourfold.train.resume import reopen_run, resumed
from fourfold.train.start import open_run
from tests.train import rank_jobs


def plan(run: Path, *sets: str) -> RunPlan:
    return rank_jobs.plan(1, f"run.dir={json.dumps(str(run))}", "checkpoint.every=2", *sets)


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
    run.env_json.unlink()
    reopen_run(going_on.plan, run, going_on.choice)
    assert run.metrics.read_text() == ""  # step 1 is written again
    assert run.env_json.exists()
    with pytest.raises(DataError, match="no checkpoint in it"):
        resumed(asked, "must")


@pytest.mark.parametrize(
    "remains", [(), ("spec.toml",), ("spec.toml", ".spec.json.17.tmp"), (".spec.toml.17.tmp",)]
)
def test_what_a_start_left_that_was_killed_in_the_claim_is_removed(tmp_path, remains):
    run = tmp_path / "run"
    run.mkdir()
    for name in remains:
        (run / name).touch()
    assert resumed(plan(run), "auto") is None
    assert not run.exists()


def test_a_directory_of_somebody_elses_is_left_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.tex").touch()
    with pytest.raises(DataError):
        resumed(plan(run), "auto")
    assert (run / "thesis.tex").exists()


def test_nothing_is_begun_anew_that_would_be_lost_by_it(tmp_path):
    asked = plan(tmp_path / "run")
    run = open_run(asked, "")
    note(run.events(0), step=2, kind="saved", checkpoint="step-00000002")
    with pytest.raises(DataError, match="no checkpoint in it"):  # somebody took it away
        resumed(asked, "auto")

    unsaved = plan(tmp_path / "unsaved", "checkpoint.every=0")
    run = open_run(unsaved, "")
    assert resumed(unsaved, "auto") is not None  # killed before its first step
    note(run.metrics, step=1, loss=2.0)
    with pytest.raises(DataError, match="no checkpoint in it"):  # perhaps at its end
        resumed(unsaved, "auto")

    damaged = plan(tmp_path / "damaged")
    run = open_run(damaged, "")
    (run.checkpoints / "step-00000002").mkdir(parents=True)
    with pytest.raises(DataError, match="step-00000002"):
        resumed(damaged, "auto")
