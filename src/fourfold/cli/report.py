"""`fourfold report`: a run directory becomes one page."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from fourfold.cli.output import next_command, print_document, table


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
    from fourfold.lab.report_course import course
    from fourfold.record.reader import read_json

    page = build_report(run)
    document = read_json(page.with_suffix(".json"))
    if json:
        print_document({**document, "page": str(page)})
        return 0
    print(f"{document['verdict']}: {document['reason']}")
    rows = course(document)
    if rows:
        print(f"\n{table(('', 'course of the run'), rows)}\n")
    print(page)
    ended = document["summary"]["ended"]
    replays = [row["command"] for row in document["commands"] if row["repeats"] == "the failing step"]
    on = [document["go_on"]] if document["go_on"] else []
    next_command(*(replays if ended == "failed" else ()), *on, f"python -m webbrowser {quote(str(page))}")
    return 0
