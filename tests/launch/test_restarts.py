"""Ranks that failed are started again: when, how often, and what is kept of each attempt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from fourfold.launch import stop, watch
from fourfold.launch.agent import Launch, LoopbackRendezvous, launch
from fourfold.launch.failure import FailureReport
from fourfold.launch.restarts import Attempts, Point, Restarts, can_mend
from fourfold.launch.watch import Outcome
from fourfold.record.reader import read_lines
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import DataError, Problem
from tests.launch.procs import lives, read_when_there, wait_until_gone

PLAIN = Path(__file__).with_name("plain_rank.py")
PROBLEM = Problem("asked", "found", "why", "instead")
BUG = FailureReport(
    rank=1, kind="raised", step=5, phase="forward", message="a bug\nmore", exit_code=1, time=1.0
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(watch, "SETTLE_S", 0.5)
    monkeypatch.setattr(watch, "KILLED_SETTLE_S", 0.5)


def nothing() -> None:
    """Nothing to prepare."""


def looking(steps: Sequence[int], also: Callable[[], None] = nothing) -> Callable[[], Point]:
    """`look` that tells of these steps one after another, the last again and again."""
    left = list(steps)

    def look() -> Point:
        also()
        step = left.pop(0) if len(left) > 1 else left[0]
        return Point(step, f"goes on after step {step}", nothing)

    return look


def again(run_dir: Path, *ways: str, restarts: Restarts | None, **limits: float) -> Outcome:
    command = (sys.executable, str(PLAIN), str(run_dir), *ways)
    outcome = launch(Launch(command, 2, run_dir, restarts=restarts, **limits))
    assert not [pid for line in record(run_dir, "start") for pid in line["pids"] if lives(pid)]
    return outcome


def record(run_dir: Path, kind: str) -> list[dict[str, object]]:
    return [line for line in read_lines(RunDir(run_dir).attempts) if line["kind"] == kind]


def test_after_a_kill_all_are_started_again_under_the_same_store(tmp_path, capfd):
    outcome = again(tmp_path, "sleep/show", "kill/show", restarts=Restarts(1, looking([4])))
    assert outcome == Outcome(0, restarts=1)
    told = "restart 1 of 1: rank 1 was killed by SIGKILL at step 5 (forward); goes on after step 4"
    assert told in " ".join(capfd.readouterr().err.split())
    assert told in " ".join(RunDir(tmp_path).log.read_text().split())
    shown = [json.loads((tmp_path / f"env{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["FOURFOLD_ATTEMPT"] for one in shown] == ["1", "1"]
    assert [line["exit_code"] for line in record(tmp_path, "end")] == [137, 0]
    assert [line["attempt"] for line in record(tmp_path, "start")] == [0, 1]
    assert record(tmp_path, "restart")[0]["after_step"] == 4
    assert RunDir(tmp_path).failures_md.read_text().startswith("# Started again since: 2 ranks of ")


def test_no_port_is_given_up_between_attempts(tmp_path):
    ways = ("port/port/show",) * 2
    assert again(tmp_path, *ways, restarts=Restarts(2, looking([0]))).exit_code == 0
    assert len(set((tmp_path / "ports0").read_text().split())) == 1
    assert len((tmp_path / "ports0").read_text().split()) == 2


def test_each_attempt_has_a_part_of_the_store_to_itself():
    host = LoopbackRendezvous(timedelta(seconds=5))
    first = host.next_rendezvous().store
    host.attempt = 1
    first.set("key", "value")
    assert not host.next_rendezvous().store.check(["key"])


def test_it_ends_after_so_many_restarts_without_progress_and_says_so(tmp_path, capfd):
    outcome = again(tmp_path, "end", "bug", restarts=Restarts(2, looking([3]), step=3))
    assert (outcome.exit_code, outcome.restarts, outcome.failures[0].rank) == (1, 2, 1)
    screen = capfd.readouterr().err
    gave_up = "not started again: 2 restarts in a row brought no checkpoint newer than that of step 3"
    assert screen.index("restart 2 of 2") < screen.index(gave_up) < screen.index("First to fail:")
    text = (tmp_path / "failures.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("# ")]
    assert [title.split(":")[0] for title in titles] == ["# Failed", *["# Started again since"] * 2]
    assert [title.rpartition("`")[2] for title in titles] == [" (attempt 2)", " (attempt 1)", ""]
    for attempt, folder in enumerate(("failures", "failures/attempt1", "failures/attempt2")):
        report = FailureReport.model_validate_json((tmp_path / folder / "rank1.json").read_text())
        assert report.evidence.endswith(f"{folder}/rank1.json"), attempt
        assert report.evidence in text


def test_progress_begins_the_count_again(tmp_path):
    looks = looking([3, 3, 5, 5, 5, 99])  # before it: 0; the fifth restart would be the third in a row
    outcome = again(tmp_path, "end", "bug", restarts=Restarts(2, looks))
    assert (outcome.exit_code, outcome.restarts) == (1, 4)
    assert [line["in_a_row"] for line in record(tmp_path, "restart")] == [1, 2, 1, 2]


def test_falling_back_and_coming_again_to_the_same_step_is_no_progress(tmp_path):
    outcome = again(tmp_path, "end", "bug", restarts=Restarts(1, looking([8, 4, 8])))
    assert outcome.restarts == 1


def test_where_every_checkpoint_has_gone_it_does_not_begin_anew(tmp_path, capfd):
    assert again(tmp_path, "end", "bug", restarts=Restarts(5, looking([0]), step=8)).restarts == 0
    assert "the checkpoint of step 8 is gone, and every other" in capfd.readouterr().err


def test_a_hung_rank_is_started_again(tmp_path):
    assert again(tmp_path, "sleep/end", restarts=Restarts(1, looking([0])), timeout_s=0.3) == Outcome(
        0, restarts=1
    )


def test_what_a_restart_cannot_mend_is_final(tmp_path, capfd):
    outcome = again(tmp_path, "end", "raise", restarts=Restarts(5, looking([0])))
    assert (outcome.exit_code, outcome.restarts) == (2, 0)
    assert "not started again: exit code 2" in capfd.readouterr().err


def test_a_passing_error_is_not_final_whatever_its_code(tmp_path):
    outcome = again(tmp_path, "end", "passing/end", restarts=Restarts(1, looking([0])))
    assert outcome == Outcome(0, restarts=1)


@pytest.mark.parametrize(
    ("kind", "code", "mends"),
    [
        ("killed", 137, True), ("killed", 134, True), ("hung", 137, True), ("collective", 1, True),
        ("left", 1, True), ("raised", 1, True), ("raised", 7, True),
        ("raised", 2, False), ("raised", 3, False), ("raised", 4, False), ("raised", 5, False),
    ],
)  # fmt: skip
def test_what_a_restart_can_mend(kind, code, mends):
    assert can_mend(BUG.model_copy(update={"kind": kind, "exit_code": code})) is mends


def test_75_and_0_are_final(tmp_path):
    restarts = Restarts(5, looking([9]))
    assert again(tmp_path / "stopped", "stopped", restarts=restarts) == Outcome(75)
    assert again(tmp_path / "done", "end", restarts=restarts) == Outcome(0)


def test_a_failure_while_it_stops_is_final(tmp_path):
    outcome = again(tmp_path, "signal", "wait-bug", restarts=Restarts(5, looking([9])))
    assert (outcome.exit_code, outcome.restarts, outcome.failures[0].kind) == (1, 0, "raised")


@pytest.mark.parametrize(("step", "code"), [(4, 75), (0, 128 + signal.SIGTERM)])
def test_a_signal_while_no_rank_lives_ends_the_run(tmp_path, capfd, step, code):
    stop_me = looking([step], also=lambda: os.kill(os.getpid(), signal.SIGTERM))
    outcome = again(tmp_path, "end", "bug", restarts=Restarts(5, stop_me))
    assert (outcome.exit_code, outcome.failures, outcome.restarts) == (code, (), 0)
    assert "SIGTERM came while no rank lived" in capfd.readouterr().err
    assert "a plain bug" in (tmp_path / "failures.md").read_text()


def test_a_signal_after_the_first_bad_end_counts_as_between(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "SETTLE_S", 1.0)
    outcome = again(tmp_path, "late", "bug", restarts=Restarts(5, looking([4])))
    assert (outcome.exit_code, outcome.restarts) == (75, 0)


def test_a_second_signal_while_no_rank_lives_ends_it_at_once(tmp_path):
    code = f"""
import os, signal, sys, time
from pathlib import Path
from fourfold.launch import stop
from fourfold.launch.agent import Launch, launch
from fourfold.launch.restarts import Restarts
stop.SECOND_AFTER_S = 0.2
def look():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.4)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1000)
command = (sys.executable, {str(PLAIN)!r}, {str(tmp_path)!r}, "bug")
launch(Launch(command, 1, Path({str(tmp_path)!r}), restarts=Restarts(1, look)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 128 + signal.SIGINT
    assert stop.SECOND_AFTER_S > 0.2


def test_a_directory_that_cannot_be_made_ready_ends_it_with_the_failure(tmp_path, capfd):
    def refused() -> None:
        raise DataError(PROBLEM)

    looks = (
        looking([4], also=refused),
        lambda: Point(4, "", refused),
    )  # it cannot be read; cannot be written
    for number, look in enumerate(looks):
        outcome = again(tmp_path / str(number), "end", "bug", restarts=Restarts(5, look))
        assert (outcome.exit_code, outcome.restarts) == (1, 0)
        assert "not started again: asked" in capfd.readouterr().err


def test_what_an_earlier_attempt_said_is_not_a_later_ones(tmp_path):
    outcome = again(tmp_path, "bug/end", "lost/quit", restarts=Restarts(1, looking([0])))
    cause = outcome.failures[0]
    assert (cause.rank, cause.kind, outcome.exit_code) == (1, "raised", 7)
    assert "it said nothing" in cause.message


def test_attempts_are_numbered_on_through_the_run_directory(tmp_path):
    assert again(tmp_path, "show", "bug", restarts=None).exit_code == 1
    assert again(tmp_path, "show", restarts=None) == Outcome(0)
    assert json.loads((tmp_path / "env0.json").read_text())["FOURFOLD_ATTEMPT"] == "1"
    assert (tmp_path / "failures" / "rank1.json").exists()
    assert (tmp_path / "failures.md").read_text().startswith("# Started again since: ")


def test_a_record_that_cannot_be_read_is_said_before_anything_starts(tmp_path):
    RunDir(tmp_path).attempts.write_text("no JSON\n{}\n")
    with pytest.raises(DataError, match=r"attempts\.jsonl"):
        launch(Launch(("true",), 1, tmp_path))


def test_the_record_says_which_signal_came_and_why_it_ended(tmp_path):
    attempts = Attempts(tmp_path, Restarts(0, looking([4])), ("x",), 2)
    attempts.end(Outcome(75), [(signal.SIGTERM, 1.0)], None)
    attempts.end(Outcome(1, (BUG,)), [], 0.0)
    attempts.close()
    assert [line["signal"] for line in record(tmp_path, "end")] == ["SIGTERM", None]
    [final] = record(tmp_path, "final")
    assert str(final["told"]).startswith("not started again: ")


def test_a_full_disk_ends_it_with_the_failure(tmp_path, monkeypatch):
    attempts = Attempts(tmp_path, Restarts(5, looking([4])), ("x",), 2)

    def full(_: object) -> None:
        raise DataError(PROBLEM)

    monkeypatch.setattr(attempts._record, "write", full)
    ended = attempts.end(Outcome(1, (BUG,)), [], 0.0)
    assert ended is not None
    assert (ended.exit_code, ended.restarts) == (1, 0)
    assert "not started again" in ended.told
    attempts.close()


def test_nothing_is_left_when_the_launcher_is_killed_after_a_restart(tmp_path):
    command = (sys.executable, str(PLAIN), str(tmp_path), "kill/sleep", "end/parent")
    code = f"""
from pathlib import Path
from fourfold.launch.agent import Launch, launch
from fourfold.launch.restarts import Point, Restarts
restarts = Restarts(1, lambda: Point(0, "", lambda: None))
launch(Launch({command!r}, 2, Path({str(tmp_path)!r}), restarts=restarts))
"""
    launcher = subprocess.Popen([sys.executable, "-c", code])
    child = int(read_when_there(tmp_path / "child"))
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    ranks = record(tmp_path, "start")[1]["pids"]
    wait_until_gone(child, *ranks)


@pytest.mark.parametrize("number", ["one", None, 1.5])
def test_a_record_of_attempts_without_a_number_is_unreadable(tmp_path, number):
    RunDir(tmp_path).attempts.write_text(json.dumps({"attempt": number, "kind": "start"}) + "\n")
    with pytest.raises(DataError, match="not a whole number"):
        Attempts(tmp_path, None, ("x",), 1)


def test_a_file_that_could_not_be_written_is_not_named(tmp_path, capfd):
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "rank0.json").mkdir()  # in the place of the report
    outcome = launch(Launch((sys.executable, str(PLAIN), str(tmp_path), "bug"), 1, tmp_path))
    assert outcome.exit_code == 1 and outcome.failures[0].evidence == ""
    screen = capfd.readouterr().err
    assert screen.index("a plain bug") < screen.index("First to fail:")  # its own words come through
    last = screen[screen.index("First to fail:") :]
    assert "exit code 1, no report; what it said, if anything, is further up on the screen" in last
    assert "file:" not in last and "said nothing" not in last
