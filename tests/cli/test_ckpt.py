"""`fourfold ckpt`: inspect, validate, prune; their documents, exit codes and words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import main
from tests.checkpoint.example import FILES, flip, forge, leave_unfinished, truncate, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 9900 and 10000."""
    for step in (9900, 10000):
        write_checkpoint(tmp_path / "tiny-1" / "ckpt", step, f"{step}")
    return tmp_path / "tiny-1"


def call(capsys: pytest.CaptureFixture[str], *line: object, code: int = 0) -> tuple[str, str]:
    assert main(["ckpt", *map(str, line)]) == code
    out, err = capsys.readouterr()
    return out, err


def document(capsys: pytest.CaptureFixture[str], *line: object, code: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(call(capsys, *line, "--json", code=code)[0])
    return told


def test_inspect_one(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    newest = run / "ckpt" / "10000"
    out, err = call(capsys, "inspect", newest)
    assert "10,000, after 160,000 samples" in out and "torch 2.13.0" in out
    assert "tensors      4\n  model      3, 188 B\n  optimizer  1, 8 B\n" in out
    assert "model.weight" not in out
    assert err == f"next: fourfold ckpt validate {newest}\n"
    assert "model.weight [5, 3]" in call(capsys, "inspect", newest, "--tensors")[0]
    told = document(capsys, "inspect", newest)
    assert (told["schema"], told["step"], len(told["tensors"])) == ("fourfold.ckpt.inspect/1", 10000, 4)
    assert told["by_kind"]["model"] == {"tensors": 3, "bytes": 188}
    assert document(capsys, "inspect", run / "ckpt" / "9900")["step"] == 9900


def test_inspect_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("tiny-1")
    for step in (9800, 9900, 10000, 10100):
        write_checkpoint(run / "ckpt", step)
    truncate(run / "ckpt" / "step-00010100" / FILES[0])
    truncate(run / "ckpt" / "step-00009900" / "manifest.json")
    (run / "ckpt" / "step-00009800").rename(run / "ckpt" / ".aside-step-00009800-ab")
    leave_unfinished(run / "ckpt", 10200)
    out, err = call(capsys, "inspect", run)
    lines = out.splitlines()
    assert lines[:2] == [
        "path         tiny-1/ckpt",
        "checkpoints  1 valid, 856 B; 2 damaged, 4.6 KiB; 1 unfinished, 11 B; 1 set",
    ]
    assert "newest       step 10,000, after 160,000 samples" in lines
    assert "newest      10000  2027-01-15 10:46  160,000  856 B    step-00010000" in lines
    assert (
        f"damaged     step-00010100: {FILES[0]}: " in out
        and "damaged     step-00009900: manifest.json" in out
    )
    assert "unfinished  .saving-step-00010200-abcd: a save that was not finished" in out
    assert "set aside   9800 " in out
    assert "hashes are not checked here" in lines[-1] and max(map(len, lines)) <= 80
    newest = run / "ckpt" / "step-00010000"
    assert err == f"next: fourfold ckpt inspect {newest}\n  or: fourfold ckpt validate {run}\n"
    told = document(capsys, "inspect", run / "ckpt")
    assert (told["schema"], told["newest_valid"]) == ("fourfold.ckpt.list/1", str(newest))
    states = ["damaged", "valid", "damaged", "unfinished", "set aside"]
    assert [entry["state"] for entry in told["checkpoints"]] == states


def test_validate_a_whole_one(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    out, err = call(capsys, "validate", run)
    assert out.startswith(f"pass: {run / 'ckpt' / '10000'}\n")
    assert err.startswith("next: fourfold ckpt inspect ")
    told = document(capsys, "validate", run)
    assert (told["schema"], told["verdict"], told["instead"]) == ("fourfold.ckpt.validate/1", "pass", None)
    assert {finding["verdict"] for finding in told["findings"]} == {"pass"} and len(told["findings"]) == 6


@pytest.mark.parametrize("where", ["", "ckpt", "ckpt/10000"])
def test_validate_a_damaged_one(capsys: pytest.CaptureFixture[str], run: Path, where: str) -> None:
    flip(run / "ckpt" / "10000" / FILES[1], 2000)
    older = run / "ckpt" / "9900"
    out, err = call(capsys, "validate", run / where, code=5)
    assert out.startswith("fail: ") and f"{FILES[1]}: its hash is" in " ".join(out.split())
    assert f"--resume takes {older}\n" in out
    assert err == f"next: fourfold ckpt inspect {older}\n"
    told = document(capsys, "validate", run / where, code=5)
    assert (told["verdict"], told["instead"]) == ("fail", str(older))
    [failed] = [finding for finding in told["findings"] if finding["verdict"] == "fail"]
    assert failed["claim"] == "10000: every file has the hash it was written with"
    assert failed["command"] == f"fourfold ckpt validate {run / 'ckpt' / '10000'}"


def test_validate_without_a_manifest(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    truncate(run / "ckpt" / "10000" / "manifest.json")
    told = document(capsys, "validate", run, code=5)
    verdicts = [finding["verdict"] for finding in told["findings"]]
    assert verdicts == ["pass"] * 6 + ["fail"] + ["open"] * 5
    (run / "ckpt" / "9900" / FILES[0]).unlink()
    out, err = call(capsys, "validate", run / "ckpt" / "10000", code=5)
    assert "--resume takes none" in out and err == ""


def test_a_newer_version(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    forge(run / "ckpt" / "10000", lambda body: body.update(schema="fourfold.checkpoint/2"))
    assert "format version 2" in call(capsys, "validate", run, code=5)[0]
    _, err = call(capsys, "inspect", run / "ckpt" / "10000", code=5)
    assert "a newer Fourfold wrote this" in err and "pip install --upgrade fourfold" in err


def test_the_last_moment_of_the_calendar(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    forge(run / "ckpt" / "10000", lambda body: body.update(created=253402300799.0))
    assert "9999-12-31 23:59:59 UTC" in call(capsys, "inspect", run / "ckpt" / "10000")[0]
    forge(run / "ckpt" / "10000", lambda body: body.update(created=1e300))
    assert "created: Input should be less than" in call(capsys, "inspect", run / "ckpt" / "10000", code=5)[1]


def test_prune(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    leave_unfinished(run / "ckpt", 9950, age_s=1000)
    names = sorted(path.name for path in (run / "ckpt").iterdir())
    out, err = call(capsys, "prune", run, "--keep-last", 1, "--dry-run")
    assert "2 would go" in out and "9900: not among the newest 1" in out
    assert err == f"next: fourfold ckpt prune {run} --keep-last 1\n"
    assert sorted(path.name for path in (run / "ckpt").iterdir()) == names
    told = document(capsys, "prune", run / "ckpt", "--keep-last", 1, "--keep-every", 100, "--dry-run")
    assert (told["schema"], told["dry_run"], told["removed"]) == ("fourfold.ckpt.prune/1", True, [])
    assert [folder["action"] for folder in told["folders"]] == ["goes", "stays", "stays"]
    hourly = ("prune", run, "--keep-last", 1, "--keep-every-s", 3600)
    out, err = call(capsys, *hourly, "--dry-run")
    assert "9900: the first of its 3600 s" in out and "1 would go" in out
    assert err == f"next: fourfold ckpt prune {run} --keep-last 1 --keep-every-s 3600\n"
    assert document(capsys, *hourly, "--dry-run")["keep_every_s"] == 3600.0
    told = document(capsys, "prune", run, "--keep-last", 1)
    assert len(told["removed"]) == 2
    assert [path.name for path in (run / "ckpt").iterdir()] == ["10000"]
    assert "0 removed, of 1" in call(capsys, "prune", run, "--keep-last", 1)[0]


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("inspect nowhere", 5, "nothing has that name"),
        ("inspect {run} --tensors", 2, "fourfold ckpt inspect {run}/ckpt/10000 --tensors"),
        ("validate nowhere", 5, "nothing has that name"),
        ("prune nowhere --keep-last 1", 5, "nothing has that name"),
        ("prune {run} --keep-last 0", 2, "the newest valid checkpoint always stays"),
        ("prune {run} --keep-last 1 --keep-every -5", 2, "--keep-every 0"),
        ("prune {run} --keep-last 1 --keep-every-s -5", 2, "--keep-every-s 3600"),
        ("prune {run}/ckpt/10000 --keep-last 1", 2, "a single checkpoint"),
        ("prune {run}", 2, "--keep-last"),
        ("prune {run} --keep-last many", 2, "fourfold ckpt prune --help"),
        ("list {run}", 2, "fourfold ckpt --help"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], run: Path, line: str, code: int, says: str) -> None:
    out, err = call(capsys, *line.format(run=run).split(), code=code)
    assert out == "" and says.format(run=run) in err


def test_tables_fit_80_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("ckpt"), 10), write_checkpoint(Path("ckpt"), 20)
    truncate(Path("ckpt/step-00000020") / FILES[0])
    said = call(capsys, "inspect", "ckpt")[0] + call(capsys, "inspect", "ckpt/step-00000010", "--tensors")[0]
    said += call(capsys, "validate", "ckpt", code=5)[0]
    said += call(capsys, "prune", "ckpt", "--keep-last", 1, "--dry-run")[0]
    assert max(map(len, said.splitlines())) <= 80


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("inspect", "validate", "prune"):
        assert call(capsys, verb, "--help")[0].count(f"    fourfold ckpt {verb} runs/") == 3


def test_no_torch_and_no_numpy(run: Path) -> None:
    code = """
import sys
from fourfold.cli.main import main
for line in ("inspect", "validate"):
    assert main(["ckpt", line, sys.argv[1], "--json"]) == 0
assert main(["ckpt", "prune", sys.argv[1], "--keep-last", "1", "--json"]) == 0
print(*{"torch", "numpy"} & set(sys.modules), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == ""
