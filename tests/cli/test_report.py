from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.record.writer import write_json
from tests.record.example_run import write_example_run


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_says_the_verdict_and_where_the_page_is(capsys: pytest.CaptureFixture[str]) -> None:
    write_example_run(Path("runs/tiny-1"))
    assert main(["report", "runs/tiny-1"]) == 0
    out, err = capsys.readouterr()
    assert out == "pass: The run finished and 3 claims held; 1 left open.\nruns/tiny-1/report.html\n"
    assert err == "next: python -m webbrowser runs/tiny-1/report.html\n"
    assert Path("runs/tiny-1/report.html").is_file()


def test_the_document_is_that_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    write_example_run(Path("runs/tiny-1"))
    assert main(["report", "runs/tiny-1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.pop("page") == "runs/tiny-1/report.html"
    assert document == json.loads(Path("runs/tiny-1/report.json").read_text())
    assert document["schema"] == "fourfold.report/1"


def test_an_unfinished_run_is_reported_and_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    write_example_run(Path("r"), steps=3, ending=None)
    assert main(["report", "r"]) == 0
    assert capsys.readouterr().out.startswith("open: The run is not finished")


def test_a_failed_run_names_the_replay_next(capsys: pytest.CaptureFixture[str]) -> None:
    run = write_example_run(Path("r"), steps=3, ending=None, failures="rank 1 failed at step 4")
    (run.failures_dir / "step-000004-rank1").mkdir(parents=True)
    write_json(run.failures_dir / "step-000004-rank1" / "bundle.json", {})
    assert main(["report", "r"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("fail: The run failed after 3 steps.")
    assert err.startswith("next: fourfold replay r/failures/step-000004-rank1\n")


def test_a_folder_that_is_no_run_is_exit_5_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    write_example_run(Path("runs/tiny-1"))
    for asked, found in (("runs/tiny-11", "nothing has that name"), ("runs", "a folder without spec.json")):
        assert main(["report", asked]) == 5
        out, err = capsys.readouterr()
        assert out == ""
        assert f"error: the run directory {asked}\n  found: {found}\n  why:   " in err
        assert "  type:  runs/tiny-1" in err


def test_without_any_run_the_error_says_how_to_make_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "nowhere"]) == 5
    assert "type:  fourfold train" in capsys.readouterr().err


def test_a_damaged_record_is_exit_5_naming_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    run = write_example_run(Path("r"))
    run.metrics.write_text('{"step": 1\n{"step": 2}\n')
    assert main(["report", "r"]) == 5
    assert "read r/metrics.jsonl\n  found: line 1 is not JSON" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_a_drawing_library() -> None:
    program = (
        "import sys; from fourfold.cli.main import main; main(['report', '--help'])\n"
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "fourfold report runs/tiny-1 --json" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
