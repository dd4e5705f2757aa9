"""A Finding: one claim about a run, what was expected, what was measured, and how to measure it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fourfold.record.run_dir import RunDir
from fourfold.record.writer import write_json
from fourfold.spec.value import Value

FINDINGS_SCHEMA = "fourfold.findings/1"

Kind = Literal["fact", "inference", "open"]
Verdict = Literal["pass", "fail", "open"]


class Finding(Value):
    """One claim: a fact was measured here, an inference follows from facts, an open one was not tested.

    `evidence` is a file, relative to the run directory; `command` measures it again; `basis` holds the
    claims an inference follows from; `would_test` says what would settle an open one.
    """

    claim: str = Field(min_length=1)
    kind: Kind
    expected: str
    measured: str
    tolerance: str = ""
    verdict: Verdict
    evidence: str = ""
    command: str = ""
    basis: tuple[str, ...] = Field(default=(), strict=False)
    would_test: str = ""

    @model_validator(mode="after")
    def _says_what_its_kind_owes(self) -> Self:
        if (self.kind == "open") != (self.verdict == "open"):
            raise ValueError("kind and verdict are open together: what was not tested has no other verdict")
        if self.kind == "inference" and not self.basis:
            raise ValueError("an inference names the claims it follows from (basis)")
        if self.kind == "open" and not self.would_test:
            raise ValueError("an open finding says what would test it (would_test)")
        return self


def fact(claim: str, expected: str, measured: str, holds: bool, **more: str) -> Finding:
    """A fact that holds or does not; `more`: tolerance, evidence, command."""
    verdict: Literal["pass", "fail"] = "pass" if holds else "fail"
    return Finding(claim=claim, kind="fact", expected=expected, measured=measured, verdict=verdict, **more)


def not_tested(claim: str, why: str, would_test: str) -> Finding:
    """An open point: what was not tested, why, and what would test it."""
    return Finding(claim=claim, kind="open", expected="", measured=why, verdict="open", would_test=would_test)


def verdict_of(findings: Sequence[Finding]) -> Literal["pass", "fail"]:
    """ "pass" if something passed and nothing failed: a check that checked nothing has shown nothing."""
    verdicts = {finding.verdict for finding in findings}
    return "pass" if "pass" in verdicts and "fail" not in verdicts else "fail"


def document(schema: str, findings: Sequence[Finding], **more: Any) -> dict[str, Any]:
    """The JSON document of a check: schema, verdict, what `more` adds, and the findings."""
    return {
        "schema": schema,
        "verdict": verdict_of(findings),
        **more,
        "findings": [finding.model_dump(mode="json") for finding in findings],
    }


def write_findings(
    run: RunDir | Path | str,
    name: str,
    findings: Sequence[Finding],
    schema: str = FINDINGS_SCHEMA,
    **more: Any,
) -> Path:
    """Write `findings/<name>.json` of a run directory (whole or not at all); DataError if it cannot be."""
    room = run if isinstance(run, RunDir) else RunDir(Path(run))
    path = room.findings / f"{name}.json"
    write_json(path, document(schema, findings, **more))
    return path
