"""The matrix of faults and checks, in words: for the screen and for docs/faults.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.catalogue import KINDS
from tests.mutants.checks import COLUMNS, OF_RUN
from tests.mutants.kinds import Mutant

BEGIN, END = "<!-- mutants -->", "<!-- end of mutants -->"
Line = Mapping[str, Any]
SHARE = 0.95  # of the kinds


@dataclass(frozen=True)
class Row:
    """One fault: by column what its check said and what it said of a run without it, where it was asked."""

    mutant: Mutant
    found: Mapping[str, Line]
    clean: Mapping[str, Line]

    @property
    def acts(self) -> bool:
        """Whether a run with the fault left other bits than one without."""
        run, control = self.found.get("run"), self.clean.get("run")
        return run is None or control is None or run["outcome"] != "missed" or run["bits"] != control["bits"]

    def cell(self, column: str) -> str:
        """A step, a dash, or what else there is to say."""
        line, control = self.found.get(column), self.clean.get(column)
        if line is None:
            return ""
        if line["outcome"] == "not applicable" or (control is not None and control["outcome"] != "missed"):
            return "–"
        if line["outcome"] == "caught":
            return {None: "yes", 0: "start"}.get(line["step"], str(line["step"]))
        if line["outcome"] == "missed" and column in OF_RUN and not self.acts:
            return "="
        return {"missed": "·"}.get(line["outcome"], line["outcome"])

    @property
    def caught_by(self) -> tuple[str, ...]:
        return tuple(column for column in COLUMNS if is_caught(self.cell(column)))


def is_caught(cell: str) -> bool:
    """Whether a cell says that the fault was caught: with the step, at the start, or without one."""
    return cell in ("yes", "start") or cell.isdigit()


@dataclass(frozen=True)
class Score:
    """What the suite came to. kinds: numbers caught. alarms: of `clean` runs without a fault."""

    kinds: frozenset[int]
    faults: int
    of_faults: int
    clean: int
    alarms: int

    @property
    def holds(self) -> bool:
        return len(self.kinds) >= SHARE * len(KINDS) and not self.alarms


def score_of(rows: Sequence[Row], clean: Sequence[Line]) -> Score:
    """Counts of what is written down."""
    caught = [row for row in rows if row.caught_by]
    kinds = frozenset(kind for row in caught for kind in row.mutant.kinds)
    asked = [row for row in rows if row.found]
    return Score(kinds, len(caught), len(asked), len(clean), sum(bool(line["alarm"]) for line in clean))


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    """By the kind's number; those of none come last."""
    return sorted(rows, key=lambda row: (row.mutant.kinds or (10**6,), row.mutant.name))


def matrix(rows: Sequence[Row]) -> str:
    """The table in Markdown: a line for each fault, a column for each check."""
    lines = [f"| kind | planted as | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for row in sorted_rows(rows):
        kinds = ", ".join(map(str, row.mutant.kinds))
        cells = " | ".join(row.cell(column) for column in COLUMNS)
        lines.append(f"| {kinds} | `{row.mutant.name}` | {cells} |")
    return "\n".join(lines)


def by_check(rows: Sequence[Row]) -> str:
    """How many faults each check was asked about, caught, and how else it went."""
    lines = [
        "| check | asked | caught | not caught | no effect in it | crash | hang |",
        "|---|---|---|---|---|---|---|",
    ]
    for column in COLUMNS:
        cells = [cell for row in rows if (cell := row.cell(column)) not in ("", "–")]
        counts = [sum(map(is_caught, cells)), *(cells.count(one) for one in ("·", "=", "crash", "hang"))]
        lines.append(f"| {column} | {len(cells)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def summary(rows: Sequence[Row], score: Score) -> str:
    """What it came to, in sentences."""
    missing = sorted(set(KINDS) - score.kinds)
    text = (
        f"{len(score.kinds)} of {len(KINDS)} kinds are caught ({len(score.kinds) / len(KINDS):.0%}), "
        f"{score.faults} of {score.of_faults} planted faults; {score.clean} runs without a fault, "
        f"{score.alarms} alarms."
    )
    if missing:
        text += f" Not caught: {', '.join(f'{kind} ({KINDS[kind]})' for kind in missing)}."
    left = [row for row in sorted_rows(rows) if row.found and not row.caught_by]
    for asked, said in ((True, "that no check catches"), (False, "not caught by the checks asked so far")):
        names = [f"`{row.mutant.name}`" for row in left if (row.found.keys() == set(COLUMNS)) == asked]
        if names:
            text += f" Planted faults {said}: {', '.join(names)}."
    return text


def section(rows: Sequence[Row], score: Score, commit: str) -> str:
    """What stands between the marks of docs/faults.md."""
    return f"{summary(rows, score)}\n\nMeasured at {commit}.\n\n{by_check(rows)}\n\n{matrix(rows)}\n"


def put_between_marks(path: Path, text: str) -> None:
    """Replace what stands between the two marks of the page; they must be there."""
    page = path.read_text(encoding="utf-8")
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin and end, f"{path} has no place for the table"
    path.write_text(f"{head}{BEGIN}\n\n{text}\n{END}{tail}", encoding="utf-8")
