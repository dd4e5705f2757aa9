"""`--max-restarts`: a rank is killed, hangs or dies, and the run that goes on is the undisturbed one, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold.checkpoint.choose import newest_valid
from fourfold.diagnose.summary import summarize
from fourfold.record.reader import read_lines
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import write_request
from fourfold.spec.errors import DataError
from fourfold.train.resume import next_point
from fourfold.verify.coverage import run_coverage
from tests.checkpoint.example import FILES, flip, leave_unfinished, write_checkpoint
from tests.cli.test_train import events, finish, unfolded
from tests.launch.procs import lives, wait_until_gone
from tests.train.living import descendants, kill, workers_of
from tests.train.rank_jobs import plan
from tests.train.test_resume import curve, go, go_to_the_end, go_words, same

SLOW = 'data.transforms=[{kind="import", target="tests.train.restart_faults:slowly"}]'


def fault(name: str) -> str:
    return SLOW.replace("slowly", name)


def restarting(run: Path, most: int, *sets: str, nproc: int = 2) -> subprocess.Popen[str]:
    return go(run, "--max-restarts", str(most), sets=sets or (SLOW,), nproc=nproc)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    go_to_the_end(run, sets=(SLOW,))
    return run


def until(process: subprocess.Popen[str], seen: Callable[[], Any]) -> Any:
    """Wait for something in the record of a run that goes on."""
    end = time.monotonic() + 90
    while not (found := seen()):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def ranks(process: subprocess.Popen[str], run: Path, attempt: int) -> list[int]:
    """Process ids of an attempt's ranks, once they are started."""
    return until(process, lambda: pids(run, attempt))


def pids(run: Path, attempt: int) -> list[int]:
    lines = read_lines(RunDir(run).attempts) if RunDir(run).attempts.exists() else ()
    return next((x["pids"] for x in lines if (x["attempt"], x["kind"]) == (attempt, "start")), [])


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int, attempt: int = 0) -> None:
    """Until every rank has done this step in this attempt."""
    started = ranks(process, run, attempt)
    until(process, lambda: all(step in steps_of(run, rank, attempt) for rank in range(len(started))))


def steps_of(run: Path, rank: int, attempt: int) -> set[int]:
    found: dict[int, set[int]] = {}
    of = -1
    for event in events(run, rank):
        if event["kind"] == "joined":
            of = int(str(event["attempt"]))
        if event["kind"] == "step":
            found.setdefault(of, set()).add(int(str(event["step"])))
    return found.get(attempt, set())


def test_after_a_kill_it_goes_on_as_the_same_run(tmp_path, undisturbed):
    run = tmp_path / "run"
    process = go(run, "--max-restarts", "1", "--json", sets=(SLOW,))
    wait_for_step(process, run, 6)
    os.kill(ranks(process, run, 0)[1], signal.SIGKILL)
    out, story = process.communicate(timeout=90)
    assert process.returncode == 0, story
    assert (json.loads(out)["restarts"], json.loads(out)["failures"]) == (1, [])
    log = RunDir(run).log.read_text()
    for told in (story, log):
        assert "restart 1 of 1: rank 1 was killed by SIGKILL at step" in unfolded(told)
        assert f"; goes on after step 4, from {RunDir(run).checkpoints / 'step-00000004'} " in unfolded(told)
    assert log[log.index("restart 1 of 1") :].partition("\n12 steps")[0] in story, "the same lines"
    same(run, undisturbed)
    assert steps_of(run, 1, 0) >= {1, 2, 3, 4, 5, 6}
    assert steps_of(run, 1, 1) == set(range(5, 13))
    assert summarize(run).ended == "finished"
    assert run_coverage(run)["verdict"] == "pass"
    assert "rank 1 was killed" in RunDir(run).failures_md.read_text()


@pytest.mark.long
def test_killed_before_anything_and_killed_again_while_it_is_started_again(tmp_path, undisturbed):
    run = tmp_path / "run"
    process = restarting(run, 2)
    for number in ranks(process, run, 0):  # two at once, while they import
        os.kill(number, signal.SIGKILL)
    os.kill(ranks(process, run, 1)[0], signal.SIGKILL)
    code, story = finish(process)
    assert code == 0, story
    assert (
        unfolded(story).count("before its first step (start); begins anew: no checkpoint was saved yet") == 2
    )
    assert "restart 2 of 2" in story
    same(run, undisturbed)
    assert summarize(run).ended == "finished"


@pytest.mark.long
def test_killed_while_a_checkpoint_is_published(tmp_path, undisturbed):
    run = tmp_path / "run"
    code, story = finish(restarting(run, 1, fault("dies_in_the_second_save")))
    assert code == 0, story
    assert "goes on after step 4" in unfolded(story)
    same(run, undisturbed)
    assert not list(RunDir(run).checkpoints.glob(".saving-*"))


@pytest.mark.long
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, undisturbed):
    run = tmp_path / "run"
    code, story = finish(restarting(run, 1, fault("damages_the_second_checkpoint")))
    assert code == 0, story
    newest = RunDir(run).checkpoints / "step-00000008"
    assert (
        f"goes on after step 4, from {newest.with_name('step-00000004')} (passed over {newest}"
        in unfolded(story)
    )
    same(run, undisturbed)


@pytest.mark.long
def test_a_hung_rank_is_ended_and_all_are_started_again(tmp_path, undisturbed):
    run = tmp_path / "run"
    process = restarting(run, 1, SLOW, "run.timeout_s=3")
    wait_for_step(process, run, 5)
    os.kill(ranks(process, run, 0)[1], signal.SIGSTOP)
    code, story = finish(process)
    assert code == 0, story
    assert "restart 1 of 1: rank 1 hung at step" in unfolded(story)
    same(run, undisturbed)


@pytest.mark.long
def test_nothing_of_any_attempt_is_left(tmp_path, undisturbed):
    """A worker is killed, then a rank with a worker: the run ends well, without a process, port or shared memory."""
    run = tmp_path / "run"
    process = restarting(run, 2, SLOW, "data.workers=1")
    seen, ports = [], set()
    try:
        for attempt in (0, 1):
            wait_for_step(process, run, 1 + 4 * attempt, attempt)
            seen += descendants(process.pid)
            rank = ranks(process, run, attempt)[0]
            ports.add(port_of(rank))
            os.kill(rank if attempt else workers_of(rank)[0], signal.SIGKILL)
        code, story = finish(process)
    finally:
        kill(process)
    assert code == 0, story
    assert "restart 1 of 2: rank 0 failed at step" in unfolded(story), (
        "the worker's end is no fault of the data"
    )
    assert len(seen) >= 8
    assert not [pid for pid in seen if lives(pid)]
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in seen)]
    (port,) = ports
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    same(run, undisturbed)


def port_of(pid: int) -> int:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(word for word in environment if word.startswith(b"MASTER_PORT=")).partition(b"=")[2])


@pytest.mark.long
def test_nothing_is_left_when_the_launcher_is_killed_after_a_restart(tmp_path):
    run = tmp_path / "run"
    process = restarting(run, 1, SLOW, "data.workers=1", "run.steps=100000", nproc=1)
    try:
        wait_for_step(process, run, 5)
        os.kill(ranks(process, run, 0)[0], signal.SIGKILL)
        wait_for_step(process, run, 6, attempt=1)
        seen = descendants(process.pid)
        assert len(seen) >= 3, "rank, worker, leash"
        process.kill()
        process.communicate()
        wait_until_gone(*seen)
    finally:
        kill(process)


@pytest.mark.long
def test_who_dies_at_the_same_step_again_ends_the_run(tmp_path):
    run = tmp_path / "run"
    code, story = finish(restarting(run, 1, fault("always_dies")))
    assert code == 128 + signal.SIGKILL
    assert "not started again: 1 restart brought no checkpoint" in story
    assert story.rindex("First to fail:") > story.index("not started again")
    assert [step for step, *_ in curve(run)] == [1, 2, 3], "the first attempt's lines were taken back"
    assert summarize(run).ended == "failed"
    assert RunDir(run).failures_md.read_text().count("rank 1 was killed by SIGKILL at step") == 2


def test_a_value_that_is_not_finite_is_not_tried_again(tmp_path):
    run = tmp_path / "run"
    code, story = finish(restarting(run, 3, fault("never_finite")))
    assert code == 3, story
    assert "not started again: exit code 3" in story
    assert [pids(run, attempt) != [] for attempt in (0, 1)] == [True, False]


@pytest.mark.long
def test_a_directory_that_cannot_be_written_any_more_ends_it_with_the_failure(tmp_path):
    run = tmp_path / "run"
    process = restarting(run, 1, nproc=1)
    wait_for_step(process, run, 5)
    RunDir(run).plan_json.unlink()
    RunDir(run).plan_json.mkdir()  # root may write everywhere, but not a file over a folder
    os.kill(ranks(process, run, 0)[0], signal.SIGKILL)
    code, story = finish(process)
    assert code == 128 + signal.SIGKILL
    assert "not started again: write the file" in story
    assert "rank 0 was killed by SIGKILL" in story


@pytest.mark.long
def test_a_stop_after_a_restart_is_a_stop(tmp_path, undisturbed):
    run = tmp_path / "run"
    process = restarting(run, 1)
    wait_for_step(process, run, 5)
    os.kill(ranks(process, run, 0)[0], signal.SIGKILL)
    ranks(process, run, 1)  # they import: the signal waits for them
    process.send_signal(signal.SIGTERM)
    code, story = finish(process)
    assert code == 75, story
    assert newest_valid(RunDir(run).checkpoints).step == 5
    go_to_the_end(run, "--resume", "must", sets=(SLOW,))
    same(run, undisturbed)


@pytest.mark.long
def test_under_torchrun_its_own_restarts_go_on_in_the_same_way(tmp_path, undisturbed):
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = go_words(run, "--resume", "auto", sets=(SLOW,))
    process = subprocess.Popen(
        [*torchrun, "--max-restarts", "1", "-m", "fourfold", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(process, lambda: 6 in steps_of(run, 1, 0))
    joined = next(event for event in events(run, 1) if event["kind"] == "joined")
    os.kill(int(str(joined["pid"])), signal.SIGKILL)
    code, story = finish(process)
    assert code == 0, story
    assert [event["attempt"] for event in events(run, 1) if event["kind"] == "joined"] == [0, 1]
    same(run, undisturbed)


@pytest.fixture
def stored(tmp_path):
    """A run's directory with a line of metrics, and no checkpoint yet."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    asked = plan(2)
    write_request(run, asked.spec, {}, "")
    run.metrics.write_text('{"step": 3, "loss": 1.0}\n')
    return run, asked


def resume_from(run: RunDir) -> str | None:
    found: str | None = json.loads(run.plan_json.read_text())["resume_from"]
    return found


def test_the_next_attempt_goes_on_from_the_newest_that_is_whole(stored):
    run, asked = stored
    older, newer = write_checkpoint(run.checkpoints, 4), write_checkpoint(run.checkpoints, 8)
    flip(newer / FILES[0], 8)
    dead = leave_unfinished(run.checkpoints, 12)
    point = next_point(asked, run)
    assert (point.step, dead.exists(), newer.exists()) == (4, True, True), "looking changes nothing"
    assert f"from {older} (passed over {newer}: " in point.told
    point.prepare()
    assert resume_from(run) == str(older)
    assert (dead.exists(), newer.exists()) == (False, False)
    assert [path.name[:21] for path in run.checkpoints.glob(".aside-*")] == [".aside-step-00000008-"]
    assert run.metrics.read_text(), "taken back by the rank that goes on, to the very line"


def test_where_nothing_was_saved_it_begins_anew(stored):
    run, asked = stored
    dead = leave_unfinished(run.checkpoints, 4)
    point = next_point(asked.model_copy(update={"resume_from": "another"}), run)
    assert (point.step, point.told) == (0, "begins anew: no checkpoint was saved yet")
    point.prepare()
    assert (resume_from(run), run.metrics.read_text(), dead.exists()) == (None, "", False)


def test_where_all_that_was_saved_is_damaged_or_gone_it_does_not_begin_anew(stored):
    run, asked = stored
    saved = write_checkpoint(run.checkpoints, 4)
    flip(saved / FILES[0], 8)
    with pytest.raises(DataError, match="step-00000004"):
        next_point(asked, run)
    saved.rename(run.path / "elsewhere")
    assert next_point(asked, run).step == 0
    run.events_dir.mkdir()
    run.events(0).write_text('{"kind": "saved", "step": 4}\n')
    with pytest.raises(DataError, match="no checkpoint in it"):
        next_point(asked, run)
