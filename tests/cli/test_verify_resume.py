"""`fourfold verify resume` as a person types it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from fourfold.cli.main import main

pytestmark = pytest.mark.timeout(300)  # a check is a dozen small pools, one after another


def test_it_prints_a_table_and_the_next_command(spec, capsys):
    assert main(["verify", "resume", spec, "--world", "1", "--set", "run.seed=3"]) == 0
    printed = capsys.readouterr()
    assert "killed twice in one epoch: no committed step is lost" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    assert "runs/verify-small-1/findings/resume.json" in printed.out
    assert "for the check: run.steps 100 -> 13" in printed.err
    command = next(line for line in printed.err.splitlines() if line.startswith("next: "))
    assert command.startswith(
        "next: fourfold train small.toml --nproc 1 --set run.seed=3 --set checkpoint.every=10"
    )
    # It is a command that can be typed.
    assert main([*shlex.split(command.removeprefix("next: fourfold ")), "--dry-run"]) == 0


def test_json_is_one_document_whose_command_can_be_repeated(spec, capsys, tmp_path):
    assert main(["verify", "resume", spec, "--world", "1", "--out", "here", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "fourfold.verify.resume/1"
    assert document["verdict"] == "pass" and len(document["scenarios"]) == 3
    assert document["findings_file"] == "here/findings/resume.json"
    command = document["findings"][0]["command"]
    assert command == "fourfold verify resume small.toml --world 1"
    assert main([*command.split()[1:], "--out", "here", "--json"]) == 0
    repeated = json.loads(capsys.readouterr().out)
    assert [f["measured"] for f in repeated["findings"]] == [f["measured"] for f in document["findings"]]
    assert (tmp_path / "here/resume-1/stopped/metrics.jsonl").exists(), "the first one's runs are left alone"
    assert (tmp_path / "here/resume-2/stopped/metrics.jsonl").exists()


def test_a_failed_check_exits_3_and_says_where_it_begins(spec, capsys, monkeypatch):
    begins = {"claim": "the first deviating value", "measured": "step 3, loss: 2 in place of 1"}
    document = {
        "schema": "fourfold.verify.resume/1",
        "verdict": "fail",
        "changes": [],
        "findings_file": "x.json",
        "findings": [{**begins, "verdict": "fail", "tolerance": "", "command": "do it again"}],
    }
    monkeypatch.setattr("fourfold.verify.resume.verify_resume", lambda *_args, **_more: document)
    assert main(["verify", "resume", spec, "--world", "2"]) == 3
    printed = capsys.readouterr()
    assert "fail     the first deviating value: step 3, loss: 2 in place of 1" in printed.out
    assert "next: do it again" in printed.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["small.toml"], 2, "--world"),
        (["small.toml", "--world", "3"], 2, "8"),
        (["small.toml", "--world", "0"], 2, "world"),
        (["small.toml", "--world", "2", "--set", "layout.pp=3"], 2, "layout.pp"),
        (["small.toml", "--world", "2", "--set", "checkpoint.every=-1"], 2, "checkpoint.every"),
        (["small.toml", "--world", "2", "--set", "checkpoint.keep_last=0"], 2, "checkpoint.keep_last"),
        (["no.toml", "--world", "2"], 2, "no such file"),
        ([".", "--world", "2"], 2, "a folder"),
        (["small.toml", "--world", "2", "--set", "data.samples=4"], 5, "fewer than one global batch"),
        (["small.toml", "--world", "2", "--out", "small.toml"], 5, "small.toml"),
        (["small.toml", "--world", "2", "--out", "small.toml/below"], 5, "small.toml"),
    ],
)
@pytest.mark.usefixtures("spec")
def test_wrong_requests_are_refused_before_anything_starts(capsys, tmp_path, arguments, code, said):
    assert main(["verify", "resume", *arguments]) == code
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


def test_help_imports_no_torch():
    code = (
        "import sys; from fourfold.cli.main import main; main(['verify', 'resume', '--help']); "
        "assert 'torch' not in sys.modules"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "fourfold verify resume tiny --world 2" in told.stdout
