from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from fourfold.launch.agent import LoopbackRendezvous
from fourfold.launch.pulse import read_pulses
from fourfold.launch.rank import loopback
from tests.launch.procs import read_when_there, wait_until_gone

PROGRAM = Path(__file__).with_name("plain_rank.py")


def run_alone(run_dir: Path, way: str, rank: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **more}
    return subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), str(run_dir), way],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("way", "exit_code", "says"),
    [
        ("raise", 2, "rank 0 failed at step 5 (forward): a"),
        ("bug", 1, "rank 0 failed at step 5 (forward): ValueError: a plain bug"),
        ("lost", 1, "rank 0 could not go on at step 5 (forward): RuntimeError: [gloo"),
    ],
)
def test_an_exception_is_written_down_and_gives_its_exit_code(tmp_path, way, exit_code, says):
    ended = run_alone(tmp_path, way)
    assert ended.returncode == exit_code
    assert ended.stderr.startswith(says)
    assert "Traceback" not in ended.stderr
    report = json.loads((tmp_path / "failures" / "rank0.json").read_text())
    assert (report["rank"], report["step"], report["exit_code"]) == (0, 5, exit_code)
    assert report["traceback"].startswith("Traceback")
    assert "guard.py" not in report["traceback"]


def test_under_our_launcher_rank_0_leaves_the_screen_to_it(tmp_path):
    assert run_alone(tmp_path, "bug", FOURFOLD_ATTEMPT="0").stderr == ""
    assert "a plain bug" in run_alone(tmp_path, "bug", rank=1, FOURFOLD_ATTEMPT="0").stderr


def test_a_report_that_cannot_be_written_is_said_on_the_screen_instead(tmp_path):
    (tmp_path / "failures").write_text("a file where the folder should be")
    ended = run_alone(tmp_path, "bug", FOURFOLD_ATTEMPT="0")
    assert ended.returncode == 1
    assert "a plain bug" in ended.stderr


def test_a_good_end_and_a_stop_leave_no_report(tmp_path):
    assert run_alone(tmp_path, "end").returncode == 0
    assert run_alone(tmp_path, "stopped").returncode == 75
    assert not (tmp_path / "failures").exists()


def test_a_crash_leaves_the_stack(tmp_path):
    assert run_alone(tmp_path, "abort").returncode == -signal.SIGABRT
    stack = (tmp_path / "stacks" / "rank0.txt").read_text()
    assert "Aborted" in stack
    assert "in act" in stack


def test_a_record_that_cannot_be_written_does_not_keep_the_rank_from_ending(tmp_path):
    (tmp_path / "failures").touch()
    ended = run_alone(tmp_path, "bug")
    assert ended.returncode == 1
    assert "a plain bug" in ended.stderr


def test_a_rank_that_lost_another_machines_rank_tells_what_that_one_said(tmp_path):
    info = LoopbackRendezvous(timedelta(seconds=60)).next_rendezvous()
    program = Path(__file__).with_name("torch_rank.py")
    env = dict(
        os.environ, WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", TORCHELASTIC_USE_AGENT_STORE="True"
    )
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(info.bootstrap_store_info.master_port)}
    env["GLOO_SOCKET_IFNAME"] = loopback()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / rank), "60", "raise"],
            env=env | {"RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    told = [rank.communicate()[1] for rank in ranks]
    says = "rank 1 failed at step 5 (forward): ValueError: an error of its own\n  at "
    assert told[1].startswith(says)
    assert "torch_rank.py:" in told[1]
    assert told[0].startswith("rank 0 could not go on at step 5")
    assert told[0].endswith(told[1])


def test_a_rank_that_is_asked_to_stop_ends_with_75(tmp_path):
    env = dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    rank = subprocess.Popen([sys.executable, str(PROGRAM), str(tmp_path), "wait"], env=env)
    read_when_there(tmp_path / "pid0")
    while not (tmp_path / "ready0").exists():
        assert rank.poll() is None
    rank.send_signal(signal.SIGUSR1)
    assert rank.wait() == 75
    wait_until_gone(rank.pid)
    assert read_pulses(tmp_path / "pulse")[0].beats > 1
