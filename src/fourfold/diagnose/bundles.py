"""The failure bundles of a run: that of the rank that failed first, and the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fourfold.launch.failure import in_order, read_reports
from fourfold.record.reader import read_lines
from fourfold.record.run_dir import RunDir


def bundles(run: RunDir) -> tuple[Path, ...]:
    """Every failure bundle of a run, by step and rank."""
    return tuple(sorted(path.parent for path in run.failures_dir.glob("*/bundle.json")))


def bundle_of_failure(run: RunDir) -> Path | None:
    """The bundle of the rank that failed first when the ranks last failed; None if it left none (it was killed).

    Where the record does not say who that was, it is the only one.
    """
    cause = _cause(run)
    if cause is None:
        found = bundles(run)
        return found[0] if len(found) == 1 else None
    step, rank = cause
    folder = run.failures_dir / f"step-{step:06d}-rank{rank}"
    return folder if (folder / "bundle.json").is_file() else None


def _cause(run: RunDir) -> tuple[int, int] | None:
    """Step and rank: as who started the ranks wrote it down, else (torchrun started them) as their own reports say."""
    if run.attempts.is_file():
        ends = [
            line for line in read_lines(run.attempts) if line.get("kind") == "end" and line.get("failures")
        ]
        first: dict[str, Any] = ends[-1]["failures"][0] if ends else {}
        return (first["step"], first["rank"]) if ends else None
    numbers = [path.name.removeprefix("attempt") for path in run.failures_dir.glob("attempt*")]
    attempt = max((int(number) for number in numbers if number.isdigit()), default=0)
    failures = in_order(read_reports(run.path, 0.0, attempt).values())
    return (failures[0].step, failures[0].rank) if failures else None
