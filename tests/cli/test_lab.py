from __future__ import annotations

import json

import pytest

from fourfold.cli.lab import resume_lines
from fourfold.cli.main import main

ROW = {"step": 11, "undisturbed": 5.0, "resumed": 5.25, "difference": 0.25, "same_samples": False}


def document(verdict="pass"):
    right = {
        "name": "right", "title": "the right way", "why": "word " * 30, "rows": [{**ROW, "difference": 0.0}],
        "seen": [], "fourfold": ["goes on from step-00000010"], "verdict": "pass",
    }  # fmt: skip
    wrong = {
        **right,
        "name": "wrong",
        "title": "a wrong way",
        "rows": [ROW],
        "seen": ["seen"],
        "verdict": verdict,
    }
    measured = "x" * 20 + " y" * 40
    return {
        "schema": "fourfold.lab.resume/1",
        "verdict": verdict,
        "world": 2,
        "steps": 20,
        "saved": 10,
        "exercises": [right, wrong],
        "findings": [{"claim": "wrong: it is caught", "measured": measured, "verdict": verdict}],
        "findings_file": "runs/verify-lab-1/findings/lab-resume.json",
        "runs": "runs/verify-lab-1/lab-resume-1",
    }


@pytest.fixture
def asked(monkeypatch):
    """What the command asks of the lab, which answers at once."""
    calls = []

    def lab_resume(**more):
        calls.append(more)
        return document("fail" if str(more["out"]) == "bad" else "pass")

    monkeypatch.setattr("fourfold.lab.resume.lab_resume", lab_resume)
    return calls


def test_resume_prints_its_exercises_and_the_next_command(asked, capsys):
    assert main(["lab", "resume"]) == 0
    printed = capsys.readouterr()
    assert asked[0]["out"] is None
    assert " -> the same run, to the last bit" in printed.out and " -> caught" in printed.out
    assert "   11   5.000000000   5.250000000     2.5e-01  others" in printed.out
    assert "next: fourfold verify resume tiny --world 2" in printed.err


@pytest.mark.usefixtures("asked")
def test_resume_exits_3_where_a_mistake_is_not_caught(capsys):
    assert main(["lab", "resume", "--out", "bad"]) == 3
    printed = capsys.readouterr().out
    assert " -> NOT caught" in printed and "failed: wrong: it is caught: xxxx" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.usefixtures("asked")
def test_resume_as_json_is_one_document(capsys):
    assert main(["lab", "resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document()
    assert main(["lab", "resume", "--out", "bad", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "fail"


def test_resume_with_an_unknown_option_is_usage(asked, capsys):
    assert main(["lab", "resume", "--steps", "5"]) == 2
    assert not asked and "--steps" in capsys.readouterr().err


def test_a_device_check_without_a_device_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["lab", "device"]) == 0
    printed = capsys.readouterr()
    assert not printed.out and printed.err.startswith("skipped: torch ")
    assert main(["lab", "device", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "open"
    assert main(["lab", "device", "--device", "tpu"]) == 2


def test_names_are_never_broken_at_a_hyphen():
    told = document()
    told["exercises"][0]["fourfold"] = ["word " * 13 + ".saving-step-00000020-a6b16474: not finished"]
    assert any(line.strip().startswith(".saving-step-00000020-a6b16474") for line in resume_lines(told))


PRECISION = {
    "schema": "fourfold.lab.precision/1",
    "verdict": "pass",
    "steps": 9,
    "parameters": 12345,
    "tokens_per_step": 512,
    "scale_every": 8,
    "runs": [
        {
            "name": name, "title": name, "losses": [5.0, "nan", *[4.0] * 7], "skipped_steps": [2] * (name == "fp16"),
            "scales": [1024.0, 2048.0, *[512.0] * 7] if name == "fp16" else [None] * 9,
            "bytes": {"parameters": 10, "moments": 20, "kept": 30}, "tokens_per_s": 1234.5,
            "gradient_in_a_large_batch": {"tokens": 1000, "vanished": 0.25, "gap": 0.0},
        }
        for name in ("fp32", "fp16")
    ],
    "mistakes": [
        {"title": "a mistake", "why": "word " * 30, "seen": ["seen"], "fourfold": ["ends the run"], "verdict": "pass"}
    ],
    "findings": [{"claim": "a claim", "measured": "why not", "verdict": "open"}],
    "findings_file": "runs/verify-lab-1/findings/lab-precision.json",
    "folder": "runs/verify-lab-1/lab-precision-1",
}  # fmt: skip


def test_precision_prints_its_runs_and_mistakes_and_the_next_command(monkeypatch, capsys):
    answers = []

    def lab_precision(**more):
        answers.append(more)
        return PRECISION | ({"verdict": "fail"} if more["out"] else {})

    monkeypatch.setattr("fourfold.lab.precision.lab_precision", lab_precision)
    assert main(["lab", "precision"]) == 0
    printed = capsys.readouterr()
    text = printed.out.splitlines()
    assert "fp16  5.0000  4.0000  4.0000  4.0000  4.0000" in text
    assert "fp32  -          -        -          none" in text
    assert "fp16  1,024      2,048    512        step 2" in text
    assert " -> caught" in text and "not tested: a claim: why not" in text
    assert max(map(len, text)) <= 80
    assert "next: fourfold train tiny --nproc 2 --set precision.compute=bf16" in printed.err
    assert main(["lab", "precision", "--out", "bad", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["schema"] == "fourfold.lab.precision/1"
    assert main(["lab", "precision", "--help"]) == 0
    assert capsys.readouterr().out.count("fourfold lab precision") == 4


@pytest.mark.parametrize(
    ("nproc", "instead"), [("99", "--nproc 24"), ("5", "--nproc 6 or --nproc 4"), ("0", "--nproc 1")]
)
def test_a_demonstration_on_ranks_that_cannot_share_its_batch_is_refused(
    nproc, instead, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "demo", "--nproc", nproc]) == 2
    assert f"  type:  {instead}\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
