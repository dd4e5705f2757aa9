"""SIGTERM, SIGUSR1 and SIGINT in every phase: a complete checkpoint, exit 75, and the run that goes on is the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from fourfold.launch.rank import Rank
from fourfold.launch.stop import STOP_SIGNALS, StopRequest
from fourfold.record.run_dir import RunDir
from fourfold.train import rank
from tests.cli.test_train import FOURFOLD, finish, unfolded
from tests.train import rank_jobs
from tests.train.living import (
    descendants,
    ended,
    kill,
    last,
    newest_step,
    phases,
    ranks_of,
    tell,
    torchrun,
    workers_of,
)
from tests.train.slow_model import SETS
from tests.train.test_resume import same

STEPS = 24
RUN = (
    f"run.steps={STEPS}",
    "checkpoint.every=4",
    "run.validate_every=2",
    "run.log_every=3",
    "data.workers=2",
)


def go(run: Path, *words: str, sets: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    asked = [*FOURFOLD, *train(run, "--nproc", "2", *words, sets=sets)]
    return subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(run: Path, *words: str, sets: tuple[str, ...] = ()) -> list[str]:
    settings = (*SETS, f"run.dir={json.dumps(str(run))}", *RUN, *sets)
    return ["train", "tiny", "--resume", "auto", *words, *(w for each in settings for w in ("--set", each))]


def meet(process: subprocess.Popen[str], run: Path, phase: str, after: int) -> None:
    """Wait until a rank is in that phase, of a step after `after`."""
    until = time.monotonic() + 60
    while not met(process, run, phase, after):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < until
        time.sleep(0.001)


def met(process: subprocess.Popen[str], run: Path, phase: str, after: int) -> bool:
    if phase == "import":
        return len(ranks_of(process.pid)) == 2
    where = phases(run)
    if phase == "opening data and model":
        return any(now == phase for _, now in where.values())
    if phase == "warm-up":
        return any(now.startswith(phase) for _, now in where.values())
    return any(now == phase and step > after for step, now in where.values())


def ends(run: Path) -> list[object]:
    """After which step each rank ended in good order."""
    return [event and event["step"] for event in (last(run, "end", 0), last(run, "end", 1))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    code, story = finish(go(run))
    assert code == 0, story
    return run


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_signal_to_every_process_in_every_phase(tmp_path, undisturbed):
    """Each process gets each signal, and gets it again: launcher, ranks, loader workers, and what holds the leash."""
    run = tmp_path / "run"
    before = 0
    for phase in ("import", "opening data and model", "warm-up", "data", "forward", "save", "validation"):
        process = go(run)
        try:
            meet(process, run, phase, after=before + 2)
            everyone = [process.pid, *descendants(process.pid)]
            tell(everyone, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
            everyone += [pid for pid in descendants(process.pid) if pid not in everyone]
            tell(everyone, signal.SIGINT)
            code, story = ended(process, everyone)
        finally:
            kill(process)
        assert code == 75, (phase, story)
        assert "gives them 30" in story
        step = newest_step(run)
        assert before <= step < STEPS, phase  # as before: it stopped in the validation it began with
        assert ends(run) == [step, step]
        before = step
    assert before > 6
    code, story = finish(go(run))
    assert code == 0, story
    same(run, undisturbed)


# The launcher waits in one of its own functions until it is let go on; "before" its work or "after" it.
PLANTED = """
import sys, time
from pathlib import Path
import {module} as planted
kept = planted.{name}
def waiting(*args, **more):
    done = kept(*args, **more) if {when!r} == "after" else None
    Path({folder!r}, "here").touch()
    while not Path({folder!r}, "on").exists():
        time.sleep(0.01)
    return done if {when!r} == "after" else kept(*args, **more)
planted.{name} = waiting
from fourfold.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def told_in(folder: Path, place: tuple[str, str, str], number: int, *sets: str) -> subprocess.Popen[str]:
    """A launcher that got a signal in that place: (module, function, "before" or "after")."""
    module, name, when = place
    code = PLANTED.format(module=module, name=name, when=when, folder=str(folder))
    asked = [sys.executable, "-c", code, *train(folder / "run", "--nproc", "2", sets=sets)]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (folder / "here").exists():
        assert process.poll() is None, finish(process)
        time.sleep(0.01)
    process.send_signal(number)
    return process


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_the_run_is_begun_a_signal_ends_it_and_nothing_is_written(tmp_path, number):
    code, story = finish(told_in(tmp_path, ("fourfold.spec.load", "load_spec", "before"), number))
    assert code in (-number, 128 + number), story  # what a shell tells in the same way
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.long
def test_a_signal_while_the_run_is_begun_stops_it_after_its_first_step(tmp_path):
    process = told_in(
        tmp_path, ("fourfold.train.start", "environment", "before"), signal.SIGTERM, "data.workers=0"
    )
    assert not (tmp_path / "run" / "env.json").exists()
    (tmp_path / "on").touch()
    code, story = finish(process)
    assert code == 75, story
    assert newest_step(tmp_path / "run") == 1


@pytest.mark.parametrize(
    "place",
    [
        ("fourfold.launch.agent", "_check", "before"),
        pytest.param(("fourfold.launch.agent", "launch", "after"), marks=pytest.mark.long),
        ("fourfold.cli.main", "_run", "after"),
    ],
)
def test_a_signal_before_the_first_rank_or_after_the_last(tmp_path, place):
    process = told_in(tmp_path, place, signal.SIGUSR1, "run.steps=2", "data.workers=0")
    process.send_signal(signal.SIGINT)
    (tmp_path / "on").touch()
    code, story = finish(process)
    assert code == (75 if place[2] == "before" else 0), story
    assert newest_step(tmp_path / "run") == (1 if place[2] == "before" else 2)


@pytest.mark.parametrize("name", ["write_request", pytest.param("environment", marks=pytest.mark.long)])
def test_a_start_that_is_killed_while_the_run_is_begun_can_be_repeated(tmp_path, name):
    small = ("run.steps=2", "data.workers=0")
    process = told_in(tmp_path, ("fourfold.train.start", name, "before"), signal.SIGKILL, *small)
    assert finish(process)[0] == -signal.SIGKILL
    run = tmp_path / "run"
    assert not run.exists()
    code, story = finish(go(run, sets=small))
    assert code == 0, story
    assert newest_step(run) == 2
    assert (run / "env.json").exists()


def test_nobody_has_to_listen(tmp_path):
    """As with `fourfold train … 2>&1 | tee log` and Ctrl-C, which ends tee first."""
    run = tmp_path / "run"
    process = go(run)
    meet(process, run, "data", 3)
    assert process.stderr is not None and process.stdout is not None
    process.stderr.close()
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert ends(run) == [newest_step(run)] * 2
    assert "stopped by a signal" in (run / "log.txt").read_text()


def test_a_rank_takes_signals_to_its_very_end(tmp_path, monkeypatch):
    taken = []

    def leave(code: int) -> None:
        taken.extend(getattr(signal.getsignal(number), "__self__", None) for number in STOP_SIGNALS)
        raise SystemExit(code)

    monkeypatch.setattr(rank, "guard", lambda *_: nullcontext())
    monkeypatch.setattr(rank, "join", lambda *_: nullcontext())
    monkeypatch.setattr(rank, "_train_guarded", lambda *_: 0)
    monkeypatch.setattr(rank, "leave", leave)
    with pytest.raises(SystemExit, match="0"):
        rank.run_rank(rank_jobs.plan(1), Rank(0, 0, 1, 1), RunDir(tmp_path))
    assert [type(request) for request in taken] == [StopRequest] * 3


def test_a_save_that_takes_much_of_the_grace_is_told(ranks, tmp_path):
    for grace_s, told in ((0.002, True), (1000, False)):
        folder = tmp_path / str(grace_s)
        folder.mkdir()
        ranks(1).run(rank_jobs.whole_run, str(folder), "checkpoint.every=2", f"run.grace_s={grace_s}")
        assert (
            f"within run.grace_s, which is {grace_s}" in unfolded((folder / "log.txt").read_text())
        ) is told


@pytest.mark.parametrize("launcher", ["fourfold", pytest.param("torchrun", marks=pytest.mark.long)])
def test_nothing_is_left_of_a_killed_rank_whose_workers_wait_to_be_read(tmp_path, launcher):
    run = tmp_path / "run"
    wide = ("model.args.inputs=20000", "data.inputs=20000")  # a microbatch is more than a pipe takes
    process = go(run, sets=wide) if launcher == "fourfold" else torchrun(train(run, sets=wide))
    try:
        meet(process, run, "data", 3)
        everyone = [process.pid, *descendants(process.pid)]
        rank = next(pid for pid in everyone if len(workers_of(pid)) == 2 and pid != process.pid)
        tell([rank], signal.SIGSTOP)
        until = time.monotonic() + 30
        while not all("pipe_w" in Path(f"/proc/{pid}/wchan").read_text() for pid in workers_of(rank)):
            assert time.monotonic() < until
            time.sleep(0.01)
        tell([rank], signal.SIGKILL)
        code, story = ended(process, everyone)
        assert code == (128 + 9 if launcher == "fourfold" else 1), story
    finally:
        kill(process)


# What docs/signals.md says of torchrun.
FLAGS = ("--max-restarts", "0", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", "30")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_under_torchrun_a_signal_ends_in_1_with_a_complete_checkpoint_to_go_on_from(tmp_path, undisturbed):
    run = tmp_path / "run"
    before = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process = torchrun(train(run), *FLAGS)
        try:
            meet(process, run, "forward", before + 2)
            everyone = [process.pid, *descendants(process.pid)]
            process.send_signal(number)
            code, story = ended(process, everyone)
        finally:
            kill(process)
        assert code == 1, story
        step = newest_step(run)
        assert before < step < STEPS
        assert ends(run) == [step, step]
        before = step
    code, story = finish(torchrun(train(run), *FLAGS))
    assert code == 0, story
    same(run, undisturbed)


@pytest.mark.long
def test_torchrun_with_restarts_starts_ranks_again_that_ended_with_75(tmp_path, undisturbed):
    run = tmp_path / "run"
    process = torchrun(train(run), "--max-restarts", "1")
    meet(process, run, "forward", 2)
    tell([next(pid for pid in descendants(process.pid) if len(workers_of(pid)) == 2)], signal.SIGTERM)
    code, story = finish(process)
    assert code == 0, story
    assert "(exitcode: 75)" in story  # a failure to torchrun
    assert "stopped by a signal" in story
    same(run, undisturbed)
