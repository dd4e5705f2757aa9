"""What becomes of a new run's directory when its ranks cannot begin, or a later attempt cannot."""

from __future__ import annotations

import pytest

from fourfold.launch.failure import FailureReport
from fourfold.launch.watch import Outcome
from fourfold.plan.run_plan import make_run_plan
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.ready import ready_text
from fourfold.train.start import open_run, start

PROBLEM = Problem("a setting", "a value", "it cannot be", "another")


@pytest.fixture
def opened(tmp_path):
    plan = make_run_plan(load_spec("tiny", [f"run.dir='{tmp_path / 'run'}'"]), 1, ("x",))
    return plan, open_run(plan, ready_text("tiny"))


def refused(step):
    report = FailureReport(
        rank=0,
        kind="raised",
        step=step,
        phase="start",
        message="m",
        exit_code=2,
        time=0.0,
        problems=(PROBLEM,),
    )
    return Outcome(2, (report,))


def test_what_ranks_refuse_before_a_step_frees_the_name(opened, monkeypatch):
    plan, run = opened
    monkeypatch.setattr("fourfold.launch.agent.launch", lambda *_: refused(step=0))
    with pytest.raises(SpecError, match="it cannot be"):
        start(plan, run, new=True)
    assert not run.path.exists()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_that_took_a_step_keeps_its_directory(opened, monkeypatch, restarts):
    plan, run = opened
    ended = refused(step=3) if not restarts else Outcome(2, refused(step=0).failures, restarts=1)
    monkeypatch.setattr("fourfold.launch.agent.launch", lambda *_: ended)
    assert start(plan, run, new=True) is ended
    assert run.path.is_dir()


def test_an_error_of_a_later_attempt_never_takes_what_an_earlier_one_saved(opened, monkeypatch):
    plan, run = opened
    saved = run.checkpoints / "step-00000010"

    def launch(*_):
        saved.mkdir(parents=True)
        raise SpecError(PROBLEM)  # such as a program that can no longer be started

    monkeypatch.setattr("fourfold.launch.agent.launch", launch)
    with pytest.raises(SpecError):
        start(plan, run, max_restarts=3, new=True)
    assert saved.is_dir()
