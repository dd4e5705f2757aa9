"""How long the others are given once a rank has ended badly, by a clock that the test moves."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from fourfold.launch import watch
from fourfold.launch.failure import FailureReport
from fourfold.launch.processes import RankProcess
from fourfold.launch.watch import KILLED_SETTLE_S, SETTLE_S, Outcome, Watch
from fourfold.spec.errors import DataError, FourfoldError, Problem, SpecError


class Ended:
    """A rank's process that has ended with `code`, or lives where it is None."""

    log = None
    log_start = 0

    def __init__(self, rank: int, code: int | None) -> None:
        self.rank = rank
        self.code = code
        self.ended_at = None if code is None else time.time()

    def poll(self) -> int | None:
        return self.code

    def send(self, number: int) -> None:
        """Nobody is there to take it."""


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(RankProcess, "kill_all", lambda _: None)
    return now


def ticks(run_dir: Path, clock: list[float], code: int, seconds: float) -> Outcome | None:
    """What is decided so long after one of two ranks ended with `code`; the other one lives."""
    seen = Watch([Ended(0, None), Ended(1, code)], run_dir, 60.0, 30.0, 0.0)  # type: ignore[list-item]
    assert seen.tick([]) is None
    assert seen.bad_at == clock[0]
    clock[0] += seconds
    return seen.tick([])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_who_was_killed_from_outside_is_not_explained_by_the_others(tmp_path, clock, number):
    assert ticks(tmp_path, clock, -number, KILLED_SETTLE_S - 0.01) is None
    outcome = ticks(tmp_path, clock, -number, KILLED_SETTLE_S + 0.01)
    assert outcome is not None
    assert [(failure.rank, failure.kind) for failure in outcome.failures] == [(1, "killed")]


@pytest.mark.parametrize("code", [-signal.SIGABRT, -signal.SIGSEGV, 1, 3])
def test_after_an_error_or_a_fault_the_others_may_say_what_they_saw(tmp_path, clock, code):
    assert ticks(tmp_path, clock, code, SETTLE_S - 0.01) is None
    outcome = ticks(tmp_path, clock, code, SETTLE_S + 0.01)
    assert outcome is not None
    assert [failure.rank for failure in outcome.failures] == [1]


def test_when_the_first_bad_end_was_seen_is_known_even_if_all_are_gone_by_then(tmp_path, clock):
    seen = Watch([Ended(0, 0), Ended(1, 1)], tmp_path, 60.0, 30.0, 0.0)  # type: ignore[list-item]
    assert seen.tick([]) is not None
    assert seen.bad_at == clock[0]


def test_who_died_of_the_signal_that_was_passed_on_has_not_ended_badly(tmp_path, clock):
    seen = Watch([Ended(0, None), Ended(1, -15)], tmp_path, 60.0, 30.0, 0.0)  # type: ignore[list-item]
    assert seen.tick([(signal.SIGTERM, clock[0])]) is None
    assert seen.bad_at is None


REFUSED = {
    "rank": 1, "kind": "raised", "step": 0, "phase": "opening data and model", "message": "m", "exit_code": 5,
    "time": 1.0, "problems": (Problem("this", "that", "so", "the other"),), "traceback": "where it was",
}  # fmt: skip


@pytest.mark.parametrize(("code", "kind"), [(2, SpecError), (5, DataError)])
def test_what_ranks_refuse_before_any_step_is_their_error(code: int, kind: type[FourfoldError]) -> None:
    later = FailureReport(**{**REFUSED, "rank": 0, "kind": "collective", "exit_code": 1, "problems": ()})
    refusal = Outcome(code, (FailureReport(**{**REFUSED, "exit_code": code}), later)).refusal()
    assert type(refusal) is kind and refusal.problems == REFUSED["problems"]
    assert refusal.__notes__ == ["raised by rank 1:\nwhere it was"]


@pytest.mark.parametrize(
    "other",
    [
        {"step": 1},
        {"passing": True},
        {"kind": "killed", "exit_code": 137},
        {"exit_code": 3},  # a check that failed before the first step: a finding about the run
        {"problems": ()},  # no error of ours
    ],
)
def test_any_other_failure_is_no_refusal(other: dict[str, object]) -> None:
    assert Outcome(5, (FailureReport(**{**REFUSED, **other}),)).refusal() is None


def test_nor_is_one_after_a_restart_or_none_at_all() -> None:
    assert Outcome(5, (FailureReport(**REFUSED),), restarts=1).refusal() is None
    assert Outcome(0).refusal() is None
