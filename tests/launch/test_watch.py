"""How long the others are given once a rank has ended badly, by a clock that the test moves."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from fourfold.launch import watch
from fourfold.launch.processes import RankProcess
from fourfold.launch.watch import KILLED_SETTLE_S, SETTLE_S, Outcome, Watch


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
