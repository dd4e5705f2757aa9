"""A resumed run is the same run: parameters, moments, streams, learning rates, sample ids and losses, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from fourfold.checkpoint.choose import newest_valid
from fourfold.checkpoint.validate import read_manifest
from fourfold.record.run_dir import RunDir
from tests.cli.test_train import FOURFOLD, command, events, finish, pid, unfolded

MLP = ("checkpoint.every=4", "run.steps=12", "data.samples=40", "model.dropout=0.2", "run.log_every=3")


def go_words(run: Path, *words: str, sets: tuple[str, ...] = ()) -> list[str]:
    """What torchrun is to be given: all but --nproc, which it takes for an option of its own."""
    asked = command(*words, sets=(f"run.dir={json.dumps(str(run))}", *MLP, *sets))[len(FOURFOLD) :]
    del asked[2:4]
    return asked


def go(run: Path, *words: str, sets: tuple[str, ...] = (), nproc: int = 2) -> subprocess.Popen[str]:
    asked = command(*words, nproc=nproc, sets=(f"run.dir={json.dumps(str(run))}", *MLP, *sets))
    return subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def go_to_the_end(run: Path, *words: str, sets: tuple[str, ...] = (), nproc: int = 2) -> str:
    code, story = finish(go(run, *words, sets=sets, nproc=nproc))
    assert code == 0, story
    return story


def final(run: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, as bytes."""
    folder = newest_valid(RunDir(run).checkpoints).path
    assert folder is not None
    held = {}
    for name, record in read_manifest(folder).tensors.items():
        for chunk in record.chunks:
            with safe_open(folder / chunk.file, framework="pt") as file:
                held[f"{name} {chunk.offset}"] = (
                    file.get_tensor(chunk.key).contiguous().view(-1).numpy().tobytes()
                )
    return held


def curve(run: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in RunDir(run).metrics.read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines if "loss" in line]


def ids(run: Path, rank: int) -> dict[int, object]:
    return {int(str(e["step"])): e["sample_ids"] for e in events(run, rank) if e["kind"] == "step"}


def same(run: Path, undisturbed: Path, nproc: int = 2) -> None:
    assert final(run) == final(undisturbed)
    assert curve(run) == curve(undisturbed)
    assert [ids(run, rank) for rank in range(nproc)] == [ids(undisturbed, rank) for rank in range(nproc)]


# A transform that takes a while, so that a run of a few steps can be met in the middle of one.
SLOW = 'data.transforms=[{kind="import", target="tests.train.rank_jobs:slowly"}]'


def kill_after(run: Path, step: int, number: int, *sets: str) -> int:
    process = go(run, sets=sets)
    while f'"step": {step},' not in (
        RunDir(run).events(1).read_text() if RunDir(run).events(1).exists() else ""
    ):
        assert process.poll() is None, finish(process)
    if number == signal.SIGKILL:
        os.kill(pid(run, 1), number)
    else:
        process.send_signal(number)
    return finish(process)[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    go_to_the_end(run, "--resume", "auto", sets=(SLOW,))
    return run


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    run = tmp_path_factory.mktemp("killed") / "run"
    assert kill_after(run, 6, signal.SIGKILL, SLOW) == 128 + 9
    return run


def a_copy(run: Path, folder: Path) -> Path:
    """For a test that goes on with what another left."""
    return Path(shutil.copytree(run, folder / "run"))


def test_a_killed_run_goes_on_as_the_same_run(tmp_path, killed, undisturbed):
    run = a_copy(killed, tmp_path)
    story = go_to_the_end(run, "--resume", "must", sets=(SLOW,))
    assert "step-00000004" in story
    same(run, undisturbed)


def test_a_stopped_run_saves_first_and_goes_on_from_there(tmp_path, undisturbed):
    run = tmp_path / "run"
    assert kill_after(run, 6, signal.SIGTERM, SLOW) == 75
    stopped = next(int(str(e["step"])) for e in events(run, 0) if e["kind"] == "end")
    assert read_manifest(newest_valid(RunDir(run).checkpoints).path).step == stopped
    go_to_the_end(run, "--resume", "auto", sets=(SLOW,))
    same(run, undisturbed)


def test_resume_falls_back_over_a_damaged_checkpoint_and_says_so(tmp_path, undisturbed):
    run = a_copy(undisturbed, tmp_path)
    newest = newest_valid(RunDir(run).checkpoints).path
    shard = next(newest.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    story = go_to_the_end(run, "--resume", "must", sets=(SLOW,))
    assert "passed over" in story
    assert "passed over" in RunDir(run).log.read_text()
    assert newest.name in story
    assert curve(run) == curve(undisturbed)


def test_what_cannot_go_on_is_refused(tmp_path, undisturbed):
    nowhere = go(tmp_path / "nowhere", "--resume", "must", sets=(SLOW,))
    code, story = finish(nowhere)
    assert code == 5, story
    code, story = finish(
        go(undisturbed, "--resume", "auto", sets=(SLOW, "optimizer.lr=0.5", "model.hidden=9"))
    )
    assert code == 2
    assert "optimizer.lr" in story
    assert "model.hidden" in story
    code, story = finish(go(undisturbed, sets=(SLOW,)))
    assert code == 2
    assert "used already" in story


def test_auto_begins_where_there_is_nothing(undisturbed):
    """And is the same run as others of this file, which were begun without it."""
    assert [step for step, *_ in curve(undisturbed)] == list(range(1, 13))
    validated = [*FOURFOLD, "ckpt", "validate", str(undisturbed)]
    assert subprocess.run(validated, check=False, capture_output=True).returncode == 0


def test_a_finished_run_has_nothing_to_do(tmp_path, undisturbed):
    run = a_copy(undisturbed, tmp_path)
    files = [path for path in run.rglob("*") if path.name != "lock"]
    before = [path.stat().st_mtime_ns for path in files]
    for resume in ("must", "auto"):
        process = go(run, "--resume", resume, "--json", sets=(SLOW,))
        out, story = process.communicate(timeout=60)
        assert process.returncode == 0, story
        assert f"{run} is finished: step 12 of 12, nothing to do" in unfolded(story)
        assert f"next: fourfold verify coverage {run}\n  or: fourfold report {run}" in story
        assert (json.loads(out)["exit_code"], json.loads(out)["run"]) == (0, str(run))
    assert [path.stat().st_mtime_ns for path in files] == before
    lines = RunDir(run).events(1).read_text().splitlines(keepends=True)
    RunDir(run).events(1).write_text("".join(lines[:-1]))  # killed before it said so
    story = go_to_the_end(run, "--resume", "must", sets=(SLOW,))
    assert "goes on from" in story and "nothing to do" not in story


def test_two_runs_on_one_directory_are_refused(tmp_path):
    run = tmp_path / "run"
    long = ("run.steps=100000", SLOW)
    first = go(run, sets=long)
    while not list(RunDir(run).checkpoints.glob("step-*")):
        assert first.poll() is None, finish(first)
    code, story = finish(go(run, "--resume", "must", sets=long))
    assert code == 2
    assert f"another run is at work in it: process {first.pid} on " in story
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 75


def test_a_run_under_torchrun_goes_on(tmp_path, killed, undisturbed):
    run = a_copy(killed, tmp_path)
    words = go_words(run, "--resume", "must", sets=(SLOW,))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "fourfold",
    ]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    same(run, undisturbed)
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is finished: step 12 of 12, nothing to do" in unfolded(done.stderr)
