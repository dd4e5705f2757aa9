from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from fourfold.record.finding import Finding, document, fact, not_tested, verdict_of, write_findings
from fourfold.record.run_dir import RunDir

PASSED = Finding(claim="equal", kind="fact", expected="<= 1e-12", measured="3e-15", verdict="pass")
FAILED = Finding(claim="equal", kind="fact", expected="<= 1e-12", measured="nan", verdict="fail")
OPEN = Finding(claim="fast", kind="open", expected="", measured="", verdict="open", would_test="a GPU")


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([PASSED, OPEN], "pass"),
        ([PASSED, FAILED], "fail"),
        ([FAILED], "fail"),
        ([OPEN], "fail"),
        ([], "fail"),
    ],
)
def test_the_verdict_needs_something_that_passed_and_nothing_that_failed(
    findings: list[Finding], verdict: str
) -> None:
    assert verdict_of(findings) == verdict


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "open", "would_test": "x"}, "open together"),
        ({"verdict": "open"}, "open together"),
        ({"kind": "inference"}, "follows from"),
        ({"kind": "open", "verdict": "open"}, "would test it"),
        ({"claim": ""}, "at least 1 character"),
        ({"tolerence": "1"}, "Extra inputs"),
    ],
)
def test_a_finding_owes_what_its_kind_says(change: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        Finding.model_validate({**PASSED.model_dump(), **change})


def test_a_finding_round_trips_through_json() -> None:
    finding = Finding(
        claim="c", kind="inference", expected="1", measured="1", verdict="pass", basis=("a",), command="x"
    )
    assert Finding.model_validate(json.loads(finding.model_dump_json())) == finding


def test_a_document_is_written_into_the_run(tmp_path: Path) -> None:
    path = write_findings(
        RunDir(tmp_path), "equal", [PASSED, OPEN], schema="fourfold.verify.equal/1", worst=0.5
    )
    assert path == tmp_path / "findings" / "equal.json"
    found = json.loads(path.read_text())
    assert found == document("fourfold.verify.equal/1", [PASSED, OPEN], worst=0.5)
    assert (found["schema"], found["verdict"], found["worst"]) == ("fourfold.verify.equal/1", "pass", 0.5)
    assert [entry["claim"] for entry in found["findings"]] == ["equal", "fast"]


def test_a_fact_holds_or_fails_and_an_open_point_says_what_would_test_it() -> None:
    assert fact("equal", "<= 1e-12", "3e-15", True) == PASSED
    assert fact("equal", "<= 1e-12", "nan", False) == FAILED
    assert fact("equal", "0", "0", True, evidence="a file").evidence == "a file"
    assert not_tested("fast", "", "a GPU") == OPEN
