"""Which bundle `fourfold replay` takes, and what it says where there is none, or more than one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines, write_json
from tests.record.example_run import write_example_run

DOCUMENT = {
    "step": 4, "rank": 1, "microbatches": [], "grad_norm": 1.0, "first_nonfinite": None, "error": None,
    "reproduced": False, "recorded_error": "ValueError: x",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    asked: list[Path] = []
    monkeypatch.setattr("fourfold.train.replay.replay", lambda folder: asked.append(folder) or DOCUMENT)
    return write_example_run(Path("r"), steps=3, ending=None, failures="rank 1 failed at step 4")


def leave_bundle(run: RunDir, rank: int, step: int = 4) -> Path:
    folder = run.failures_dir / f"step-{step:06d}-rank{rank}"
    folder.mkdir(parents=True)
    write_json(folder / "bundle.json", {})
    return folder


def attempt_failed(run: RunDir, *ranks: int, step: int = 4) -> None:
    failures = [{"rank": rank, "kind": "raised", "step": step, "phase": "forward"} for rank in ranks]
    with JsonLines(run.attempts) as lines:
        lines.write({"t": 1.0, "attempt": 0, "kind": "end", "exit_code": 1, "failures": failures})


def test_the_only_bundle_of_a_run_is_taken_and_named(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = leave_bundle(run, 1)
    assert main(["replay", "r"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("step 4 of rank 1") and f"the only failure bundle of r: {bundle}" in err
    assert main(["replay", str(bundle)]) == 0
    assert "the only" not in capsys.readouterr().err


def test_of_several_that_of_the_rank_that_failed_first_is_named(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_bundle(run, 0), leave_bundle(run, 1), leave_bundle(run, 0, step=2)
    attempt_failed(run, 1, 0)
    assert main(["replay", "r"]) == 5
    err = capsys.readouterr().err
    assert "found: 3: step-000002-rank0, step-000004-rank0, step-000004-rank1" in err
    assert "type:  fourfold replay r/failures/step-000004-rank1  (the rank that failed first)" in err
    assert main(["report", "r"]) == 0
    assert capsys.readouterr().err.startswith("next: fourfold replay r/failures/step-000004-rank1\n")


def test_a_rank_that_was_killed_left_none_and_no_other_rank_is_blamed(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_bundle(run, 0, step=2)
    attempt_failed(run, 1, 0)
    assert main(["report", "r"]) == 0
    assert "replay" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("r", "a run directory without one"),
        ("nowhere", "nothing has that name"),
        ("r/events", "a folder without bundle.json"),
        ("r/spec.json", "a file, not a folder"),
    ],
)
@pytest.mark.usefixtures("run")
def test_where_there_is_no_bundle(capsys: pytest.CaptureFixture[str], asked: str, found: str) -> None:
    assert main(["replay", asked]) == 5
    err = capsys.readouterr().err
    assert f"the failure bundle of {asked}" in err or f"the failure bundle {asked}" in err
    assert f"found: {found}" in err and "why:" in err and "type:" in err and "Errno" not in err


@pytest.mark.usefixtures("run")
def test_a_refusal_needs_no_torch() -> None:
    code = (
        "import sys; from fourfold.cli.main import main; main(['replay', 'r']); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "False\n", done.stderr
