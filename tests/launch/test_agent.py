from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourfold.launch import stop, watch
from fourfold.launch.agent import Launch, launch
from fourfold.launch.failure import FailureReport
from fourfold.launch.pulse import read_pulses
from fourfold.launch.watch import Outcome
from fourfold.record.environment import cores
from fourfold.spec.errors import DataError, SpecError
from tests.launch.procs import read_when_there, wait_until_gone

PLAIN = Path(__file__).with_name("plain_rank.py")
WITH_TORCH = Path(__file__).with_name("torch_rank.py")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(watch, "SETTLE_S", 0.5)
    for module in (stop, watch):
        monkeypatch.setattr(module, "SECOND_AFTER_S", 0.4)


def plain(run_dir: Path, *ways: str, nproc: int = 2, **limits: float) -> Outcome:
    command = (sys.executable, str(PLAIN), str(run_dir), *ways)
    outcome = launch(Launch(command, nproc, run_dir, **limits))
    wait_until_gone(*pids(run_dir))
    return outcome


def with_torch(run_dir: Path, how: str, timeout_s: float = 60.0) -> Outcome:
    command = (sys.executable, str(WITH_TORCH), str(run_dir), str(timeout_s), how)
    return launch(Launch(command, 2, run_dir, timeout_s))


def pids(run_dir: Path) -> list[int]:
    return [int(path.read_text()) for path in (*run_dir.glob("pid*"), *run_dir.glob("child"))]


def test_every_rank_is_told_who_it_is_even_over_the_cores(tmp_path, capfd):
    nproc = cores() + 1
    assert plain(tmp_path, "show", nproc=nproc) == Outcome(0)
    told = [json.loads((tmp_path / f"env{rank}.json").read_text()) for rank in range(nproc)]
    assert {one["OMP_NUM_THREADS"] for one in told} == {"1"}
    assert {one["MASTER_ADDR"] for one in told} == {"127.0.0.1"}
    assert {one["FOURFOLD_ATTEMPT"] for one in told} == {"0"}
    assert len({one["MASTER_PORT"] for one in told}) == 1
    assert capfd.readouterr().out == "rank 0 is here\n"
    assert (tmp_path / "logs" / "rank1.txt").read_text() == "rank 1 is here\n"
    assert not (tmp_path / "failures.md").exists()


def test_threads_per_rank_are_a_setting(tmp_path):
    command = (sys.executable, str(PLAIN), str(tmp_path), "show")
    assert launch(Launch(command, 1, tmp_path, threads_per_rank=7)).exit_code == 0
    assert json.loads((tmp_path / "env0.json").read_text())["OMP_NUM_THREADS"] == "7"


def test_a_killed_rank_is_named_and_a_sleeping_one_is_ended(tmp_path, capfd):
    outcome = plain(tmp_path, "sleep", "kill")
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert [failure.rank for failure in outcome.failures] == [1]
    assert "rank 1 was killed by SIGKILL at step 5 (forward)" in capfd.readouterr().err
    assert "rank 1 was killed by SIGKILL at step 5 (forward)" in (tmp_path / "failures.md").read_text()


def test_the_first_failing_ranks_own_error_comes_last_with_its_file(tmp_path, capfd):
    outcome = plain(tmp_path, "lost", "raise-last")  # a slow start of the other must not count
    assert outcome.exit_code == SpecError.exit_code
    screen = capfd.readouterr().err
    assert screen.index("rank 0 could not go on") < screen.index("rank 1 failed at step 5 (forward): a")
    file = tmp_path / "failures" / "rank1.json"
    assert str(file) in screen
    assert FailureReport.model_validate_json(file.read_text()).exit_code == SpecError.exit_code
    text = (tmp_path / "failures.md").read_text()
    assert text.index("rank 1 failed") < text.index("Traceback") < text.index("rank 0 could not go on")


def test_rank_0s_own_error_is_told_once(tmp_path, capfd):
    assert plain(tmp_path, "bug", "lost").exit_code == 1
    assert capfd.readouterr().err.count("ValueError: a plain bug") == 1


def test_a_rank_that_ends_without_a_report_is_quoted(tmp_path, capfd):
    assert plain(tmp_path, "end", "crash").exit_code == 1
    assert "it broke before it could be guarded" in capfd.readouterr().err


def test_75_of_all_is_75_and_mixed_ends_are_a_failure(tmp_path, capfd):
    assert plain(tmp_path / "all", "stopped") == Outcome(75)
    mixed = plain(tmp_path / "mixed", "stopped", "end")
    assert (mixed.exit_code, mixed.failures[0].kind, mixed.failures[0].rank) == (1, "disagreed", 1)
    assert "rank 0 stopped after a signal" in capfd.readouterr().err


def test_a_signal_is_passed_on_and_ends_in_75(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    assert plain(tmp_path, "signal", "wait") == Outcome(75)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_outlives_the_grace_is_killed(tmp_path, capfd):
    assert plain(tmp_path, "signal", "deaf", grace_s=0.5).exit_code == 128 + signal.SIGTERM
    assert "rank 1 had not ended 0.5 s after SIGTERM" in capfd.readouterr().err


def test_a_second_signal_kills_at_once(tmp_path, capfd):
    assert plain(tmp_path, "signal-twice", "deaf").exit_code == 128 + signal.SIGINT
    assert "a second signal, SIGINT" in capfd.readouterr().err


def test_what_a_rank_started_ends_with_it(tmp_path):
    assert plain(tmp_path, "parent", nproc=1) == Outcome(0)
    wait_until_gone(int((tmp_path / "child").read_text()))


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    command = (sys.executable, str(PLAIN), str(tmp_path), "sleep", "parent")
    code = f"from fourfold.launch.agent import *; launch(Launch({command!r}, 2, Path({str(tmp_path)!r})))"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    for name in ("pid0", "pid1", "child"):
        read_when_there(tmp_path / name)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert len(pids(tmp_path)) == 3
    wait_until_gone(*pids(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_ranks_die_with_their_launcher_without_a_leash_too(tmp_path):
    command = (sys.executable, str(PLAIN), str(tmp_path), "sleep")
    code = f"from fourfold.launch.agent import *; launch(Launch({command!r}, 2, Path({str(tmp_path)!r})))"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    ranks = [int(read_when_there(tmp_path / name)) for name in ("pid0", "pid1")]
    while [beat.step for beat in read_pulses(tmp_path / "pulse").values()] != [5, 5]:  # inside their guard
        time.sleep(0.01)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (leash,) = set(map(int, children)) - set(ranks)
    os.kill(leash, signal.SIGKILL)
    wait_until_gone(leash)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    wait_until_gone(*ranks)


def test_a_stalled_rank_is_named_with_its_stack(tmp_path, capfd):
    outcome = plain(tmp_path, "sleep", nproc=1, timeout_s=0.3)
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert "rank 0 hung at step 5 (forward)" in capfd.readouterr().err
    assert "in act" in Path(outcome.failures[0].evidence).read_text()


def test_a_patient_phase_is_not_a_stall(tmp_path):
    assert plain(tmp_path, "patient", nproc=1, timeout_s=0.3) == Outcome(0)


def test_an_earlier_starts_reports_are_not_this_ones(tmp_path):
    plain(tmp_path, "raise", nproc=1)
    outcome = plain(tmp_path, "kill", nproc=1)
    assert outcome.failures[0].kind == "killed"


def test_what_cannot_start_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no rank to start"):
        launch(Launch(("true",), 0, tmp_path))
    with pytest.raises(SpecError, match="no-such-program"):
        launch(Launch(("no-such-program",), 1, tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(DataError):
        launch(Launch(("true",), 1, tmp_path / "file"))


def test_with_torch_all_is_well(tmp_path, capfd):
    assert with_torch(tmp_path, "well") == Outcome(0)
    assert capfd.readouterr().out == f"rank 0 of 2: {max(1, cores() // 2)} threads\n"


@pytest.mark.parametrize(
    ("how", "exit_code", "says"),
    [
        ("kill", 137, "rank 1 was killed by SIGKILL at step 5 (forward)"),
        ("raise", 1, "rank 1 failed at step 5 (forward): ValueError: an error of its own"),
        ("hang", 137, "rank 1 hung at step 5 (forward)"),
        ("leave", 1, "rank 1 ended with exit code 0 at step 5 (forward)"),
    ],
)
def test_with_torch_the_first_failing_rank_is_named_last(tmp_path, capfd, how, exit_code, says):
    outcome = with_torch(tmp_path, how, timeout_s=2.0 if how == "hang" else 60.0)
    assert outcome.exit_code == exit_code
    screen = capfd.readouterr().err
    assert screen.index("rank 0 could not go on at step 5") < screen.index(says)
    if how == "hang":
        assert "torch_rank.py" in Path(outcome.failures[0].evidence).read_text()
