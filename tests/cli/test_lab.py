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


def test_names_are_never_broken_at_a_hyphen():
    told = document()
    told["exercises"][0]["fourfold"] = ["word " * 13 + ".saving-step-00000020-a6b16474: not finished"]
    assert any(line.strip().startswith(".saving-step-00000020-a6b16474") for line in resume_lines(told))
