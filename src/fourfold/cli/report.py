"""`fourfold report`: a run directory becomes one page."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from fourfold.cli.output import next_command, print_document


def report(run: Path, /, *, json: bool = False) -> int:
    """Make the report of a run, finished or not, again from its record: report.html and report.json.

    Examples:

        fourfold report runs/tiny-1
        fourfold report runs/tiny-1 --json
        fourfold report runs/my-2

    Parameters
    ----------
    run
        A run directory.
    json
        Print one JSON document on stdout: that of report.json, and where the page is.
    """
    from fourfold.lab.report import build_report
    from fourfold.record.reader import read_json

    page = build_report(run)
    document = read_json(page.with_suffix(".json"))
    if json:
        print_document({**document, "page": str(page)})
        return 0
    print(f"{document['verdict']}: {document['reason']}")
    print(page)
    replays = [row["command"] for row in document["commands"] if row["repeats"] == "the failing step"]
    next_command(*replays[:1], f"python -m webbrowser {quote(str(page))}")
    return 0
