"""What `python -m tests.mutants` does: run what is missing, print the matrix, put it into docs/faults.md."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.checks import CHECKS
from tests.mutants.clean import read_clean, run_clean
from tests.mutants.kinds import MUTANTS, Mutant
from tests.mutants.runner import (
    columns_of,
    commit_of,
    control_name,
    missing,
    read_results,
    run_all,
    source_of,
    source_with,
    tasks_of,
)
from tests.mutants.table import Line, Row, by_check, matrix, put_between_marks, score_of, section, summary
from tests.verify.small import write_small


def main(root: Path, asked: argparse.Namespace) -> int:
    """Exit code 0; 1 where too few kinds are caught, or a run without a fault raised an alarm."""
    folder: Path = asked.folder
    results, clean_results = folder / "results.jsonl", folder / "clean.jsonl"
    spec = str(write_small(folder / "small"))
    mutants = chosen(asked.only)
    checks = [] if asked.checks == "none" else asked.checks.split(",")
    if unknown := set(checks) - set(CHECKS):
        raise SystemExit(f"--checks {','.join(unknown)}: there are {', '.join(CHECKS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not asked.table:
        tasks = list(tasks_of(root, mutants, checks, spec))
        due = tasks if asked.again else missing(tasks, read_results(results))
        say(f"{len(due)} of {len(tasks)} checks to run, {asked.jobs} at a time; results in {results}")
        run_all(due, results, commit_of(root), asked.jobs, say)
        known = {} if asked.again else read_clean(clean_results, source_of(root))
        numbers = [number for number in range(asked.clean) if number not in known]
        run_clean(spec, numbers, clean_results, source_of(root), say)
    rows = rows_of(root, read_results(results))
    clean = list(read_clean(clean_results, source_of(root)).values())
    score = score_of(rows, clean)
    shown = [row for row in rows if row.mutant in mutants]
    print(f"{matrix(shown)}\n\n{by_check(shown)}\n\n{summary(rows, score)}")
    for line in clean:
        if line["alarm"]:
            print(f"\nalarm without a fault: {line['alarm']}\n  {line['command']}")
    if mutants == MUTANTS:
        put_between_marks(root / "docs" / "faults.md", section(rows, score, commit_of(root)))
    return 0 if score.holds else 1


def chosen(only: str) -> tuple[Mutant, ...]:
    """The mutants that `only` names: their names, parts of them, or numbers of kinds. All for ""."""
    words = [word for word in only.split(",") if word]
    if not words:
        return MUTANTS
    found = tuple(
        mutant
        for mutant in MUTANTS
        if any(int(w) in mutant.kinds if w.isdigit() else w in mutant.name for w in words)
    )
    if not found:
        raise SystemExit(f"--only {only}: no such fault")
    return found


def rows_of(root: Path, results: Mapping[tuple[str, str, str], Line]) -> list[Row]:
    """What is written down of every fault, for the sources as they are."""
    columns = [column for check in CHECKS for column in columns_of(check)]

    def of(who: str, source: str) -> dict[str, Line]:
        return {c: results[who, source, c] for c in columns if (who, source, c) in results}

    return [
        Row(mutant, of(mutant.name, source_with(root, mutant)), of(control_name(mutant), source_of(root)))
        for mutant in MUTANTS
    ]


def say(text: str) -> None:
    """The story, on stderr."""
    print(text, file=sys.stderr, flush=True)


__all__: Sequence[str] = ("chosen", "main", "rows_of")
