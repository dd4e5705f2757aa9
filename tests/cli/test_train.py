"""`fourfold train` as a person starts it: real processes, from the plan to the exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fourfold.record.run_dir import RunDir
from tests.train.rank_jobs import SMALLEST

FOURFOLD = (sys.executable, "-m", "fourfold")
LONG = ("run.steps=100000", "run.timeout_s=5")


def command(*words: str, nproc: int = 2, sets: tuple[str, ...] = ()) -> list[str]:
    flags = [word for setting in (*SMALLEST, *sets) for word in ("--set", setting)]
    return [*FOURFOLD, "train", "tiny", "--nproc", str(nproc), *words, *flags]


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, story = process.communicate(timeout=60)
    return process.returncode, story


def unfolded(text: str) -> str:
    """What was said, however it was broken into lines."""
    return " ".join(text.split())


def start(run: Path, *sets: str) -> subprocess.Popen[str]:
    """A run that would go on for ever; returns when both ranks are past step 5."""
    process = subprocess.Popen(
        command(sets=(f"run.dir={json.dumps(str(run))}", *LONG, *sets)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not all('"step": 5' in text(run, rank) for rank in (0, 1)):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < until
        time.sleep(0.05)
    return process


def text(run: Path, rank: int) -> str:
    path = RunDir(run).events(rank)
    return path.read_text() if path.exists() else ""


def events(run: Path, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in text(run, rank).splitlines()]


def pid(run: Path, rank: int) -> int:
    return next(int(str(event["pid"])) for event in events(run, rank) if event["kind"] == "start")


def gone(run: Path) -> bool:
    """Whether no rank of the run is left."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        alive = [r for r in (0, 1) if Path(f"/proc/{pid(run, r)}/stat").exists()]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    done = subprocess.run(
        command("--dry-run", "--json", nproc=64), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, "64 ranks do not divide a global batch of 8"
    done = subprocess.run(
        command("--dry-run", "--json", nproc=4), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    plan = json.loads(done.stdout)
    assert plan["schema"] == "fourfold.plan/1"
    assert plan["spec"]["batch"] == {"global_batch": 8, "micro_batch": 2, "accumulation": 1}
    assert plan["rehearsal"]["state"] == plan["rank_bytes"]
    assert [each["kind"] for each in plan["rehearsal"]["traffic"]] == ["all-reduce"]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_ones_own_model_builds_it_and_leaves_stdout_to_the_plan(tmp_path):
    sets = ("--set", "model.kind=import", "--set", "model.target=tests.train.rehearsal_jobs:printing")
    root = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    asked = [*FOURFOLD, "train", "tiny", "--nproc", "4", "--set", "batch.global_batch=8", *sets, "--dry-run"]
    told = {"cwd": tmp_path, "env": os.environ | root, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*asked, "--json"], **told)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 256 * 8
    assert "hello from the model" in done.stderr
    done = subprocess.run([*asked, "--set", "layout.tp=2", "--set", "layout.dp_replicate=2"], **told)
    assert (done.returncode, done.stdout) == (2, "")
    assert "found: a model whose sharding table cuts nothing" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_recorded_audited_and_reported(tmp_path):
    run = tmp_path / "runs" / "tiny-1"
    done = subprocess.run(command("--json"), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "next: fourfold verify coverage runs/tiny-1" in done.stderr
    first = SMALLEST[0].partition("=")[0]
    assert re.search(rf"^{re.escape(first)} = .* # --set #1$", done.stderr, re.MULTILINE)
    assert re.search(r"^optimizer.lr = 0.003 +# tiny.toml:26$", done.stderr, re.MULTILINE)
    assert re.search(r"^layout.dp_replicate = 2 +# world 2$", done.stderr, re.MULTILINE)
    for name in ("spec.json", "plan.json"):
        assert json.loads((run / name).read_text())["provenance"][first] == "--set #1"
    names = {"spec.toml", "spec.json", "plan.json", "env.json", "metrics.jsonl", "events", "log.txt"}
    assert names <= {path.name for path in run.iterdir()}
    for verb in (("verify", "coverage", str(run), "--json"), ("report", str(run), "--json")):
        done = subprocess.run([*FOURFOLD, *verb], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["verdict"] == "pass"
    used = subprocess.run(
        command(sets=(f"run.dir={json.dumps(str(run))}",)), capture_output=True, text=True, check=False
    )
    assert used.returncode == 2
    assert "tiny-2" in used.stderr


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    run = tmp_path / "run"
    process = start(run)
    os.kill(pid(run, 1), signal.SIGKILL)
    code, story = finish(process)
    assert code == 128 + 9
    assert "rank 1 was killed by SIGKILL at step" in story
    assert "rank 1" in RunDir(run).failures_md.read_text()
    assert gone(run)


@pytest.mark.long
def test_a_hung_rank_ends_the_run_and_is_named(tmp_path):
    run = tmp_path / "run"
    process = start(run)
    os.kill(pid(run, 1), signal.SIGSTOP)
    code, story = finish(process)
    assert code == 128 + 9
    assert "rank 1 hung at step" in story
    assert gone(run)


# SIGINT and SIGUSR1 in quick tests: tests/train/test_signals.py.
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(other, marks=pytest.mark.long) for other in (signal.SIGUSR1, signal.SIGINT)),
    ],
)
def test_a_signal_ends_all_ranks_after_the_same_step(tmp_path, number):
    run = tmp_path / "run"
    process = start(run)
    process.send_signal(number)
    code, story = finish(process)
    assert code == 75, story
    ends = [next(event for event in events(run, rank) if event["kind"] == "end") for rank in (0, 1)]
    assert ends[0]["step"] == ends[1]["step"]
    assert [end["ending"] for end in ends] == ["stopped", "stopped"]
    assert gone(run)


@pytest.mark.long
def test_the_same_signal_twice_is_one_wish(tmp_path):
    run = tmp_path / "run"
    process = start(run)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    code, story = finish(process)
    assert code in (75, 128 + 2), story  # 130: the ranks took 2 s or more, and were told again


def test_the_same_program_runs_under_torchrun(tmp_path):
    words = command()[len(FOURFOLD) :]
    del words[2:4]  # "--nproc 2": torchrun takes it for an option of its own
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "fourfold", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny-1"
    assert [len([e for e in events(run, rank) if e["kind"] == "step"]) for rank in (0, 1)] == [4, 4]
    used = f"run.dir={json.dumps(str(run))}"
    done = subprocess.run(
        [*torchrun, "-m", "fourfold", *words, "--set", used],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "that name is used already" in done.stderr


def test_what_is_not_built_yet_is_refused_before_anything_starts(tmp_path):
    done = subprocess.run(
        [*FOURFOLD, "train", "tiny", "--nproc", "2", "--set", "model.mtp_layers=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "model.mtp_layers" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_data_that_is_not_there_takes_no_run_directory(tmp_path):
    (tmp_path / "book.txt").write_text("a text")
    done = subprocess.run(
        [*FOURFOLD, "train", "tiny", "--set", "data.kind=text", "--set", "data.path=bok.txt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "book.txt" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("word", ["--max-restarts=-1", "--max-restarts=often"])
def test_restarts_are_a_number_from_0(tmp_path, word):
    done = subprocess.run(command(word), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--max-restarts" in done.stderr
    assert "type:" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_with_restarts_says_where_they_would_begin(tmp_path):
    asked = command("--dry-run", "--max-restarts", "3")
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a restart begins anew" in " ".join(done.stdout.split())
    asked += ["--set", "checkpoint.every=2"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "begins" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_under_torchrun_restarts_are_torchruns_own(tmp_path):
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env = {**os.environ, **rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    asked = command("--max-restarts", "3", nproc=1)
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--max-restarts 3 under torchrun" in done.stderr
    assert "torchrun --max-restarts 3" in done.stderr
    assert "--resume auto" in done.stderr
    assert list(tmp_path.iterdir()) == []
