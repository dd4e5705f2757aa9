"""The report of a run: what was asked, predicted, seen and shown, on one page that asks nothing of a network."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.checkpoint.listing import list_checkpoints
from fourfold.diagnose.bundles import bundle_of_failure, bundles
from fourfold.diagnose.history import History, history
from fourfold.diagnose.summary import Summary, summarize
from fourfold.lab.report_page import render
from fourfold.lab.report_resume import going_on
from fourfold.lab.report_words import count
from fourfold.record.finding import Finding
from fourfold.record.reader import RunReader
from fourfold.record.writer import write_json, write_text
from fourfold.spec.spec import Spec
from fourfold.spec.training import BatchSpec, LayoutSpec

REPORT_SCHEMA = "fourfold.report/1"


def build_report(run_dir: Path | str) -> Path:
    """Write `report.html` and `report.json` of a run directory, finished or not; returns the former's path.

    The same record gives the same bytes. DataError if it is no run directory, or cannot be read or written.
    """
    reader = RunReader(run_dir)
    report = report_document(reader)
    page = render(report, reader.metrics(), reader.spec().model)
    write_json(reader.dir.report_json, report)
    write_text(reader.dir.report_html, page)
    return reader.dir.report_html


def report_document(reader: RunReader) -> dict[str, Any]:
    """The report as one JSON document; `verdict` is "open" where nothing failed but something is missing.

    `go_on` is the command that goes on with a run that is not finished; empty while one is at work in it.
    """
    spec, plan, findings, summary = reader.spec(), reader.plan(), reader.findings(), summarize(reader)
    past = history(reader)
    alive = bool(past.attempts) and past.attempts[-1].ending == "going on"
    verdict, reason = _verdict(summary, findings, past)
    before = "".join(f"{world}, then " for world in summary.worlds[:-1])
    return {
        "schema": REPORT_SCHEMA,
        "verdict": verdict,
        "reason": reason,
        "title": f"{spec.name} on {before}{count(summary.ranks, 'rank')}",
        "note": spec.note,
        "summary": summary.model_dump(mode="json"),
        "history": past.model_dump(mode="json"),
        "checkpoints": list_checkpoints(reader.dir.checkpoints).document(),
        "go_on": "" if summary.ended == "finished" or alive else going_on(reader),
        "asked": asked(spec, reader.provenance()),
        "findings": [finding.model_dump(mode="json") for finding in findings],
        "plan": {key: value for key, value in plan.items() if key not in ("spec", "provenance", "command")},
        "environment": reader.env(),
        "compared_between_ranks": _census(reader),
        "failures": reader.failures(),
        "commands": _commands(reader, plan, findings),
    }


def asked(spec: Spec, provenance: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every setting that is not a default, with its value and where it came from.

    What the batch relation and the layout settled by arithmetic comes last.
    """
    values = spec.model_dump(mode="json")
    rows = [{"key": key, "value": _at(values, key), "from": where} for key, where in provenance.items()]
    for section, default in (("batch", BatchSpec()), ("layout", LayoutSpec())):
        for name, usual in default.model_dump(mode="json").items():
            key, value = f"{section}.{name}", values[section][name]
            if key not in provenance and value != usual:
                rows.append({"key": key, "value": value, "from": "arithmetic"})
    return rows


def _verdict(summary: Summary, findings: Sequence[Finding], past: History) -> tuple[str, str]:
    """Pass needs a finished run and a check that passed; fail needs one thing that failed."""
    tally = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("pass", "fail", "open")}
    if summary.ended == "failed":
        return "fail", f"The run failed after {count(summary.steps_done, 'step')}."
    if tally["fail"]:
        return "fail", f"{tally['fail']} of {count(len(findings), 'claim')} did not hold."
    if summary.steps_agree is False and summary.ended != "unfinished":
        return "fail", "The ranks did not take the same steps."
    if summary.ended == "unfinished":
        return "open", f"The run is not finished: {_where(summary, past)}."
    if summary.ended == "stopped by a signal":
        return "open", f"The run was stopped by a signal after {count(summary.steps_done, 'step')}."
    if not tally["pass"]:
        return "open", "The run finished; nothing about it was checked."
    left = f"; {tally['open']} left open" if tally["open"] else ""
    return "pass", f"The run finished and {count(tally['pass'], 'claim')} held{left}."


def _where(summary: Summary, past: History) -> str:
    """Of a run that is not finished: whether it goes on."""
    done = f"{summary.steps_done} of {count(summary.steps_asked, 'step')} done"
    if past.attempts and past.attempts[-1].ending == "going on":
        return f"it is still going, {done}"
    return f"it ended without leaving a word, {done}"


def _census(reader: RunReader) -> dict[str, str]:
    """What all ranks held in common before the first step, as rank 0 wrote it down."""
    events = reader.events(0) if 0 in reader.ranks() else iter(())
    census = next((event for event in events if event.get("kind") == "census"), {})
    return {key: str(value) for key, value in census.items() if key not in ("t", "rank", "step", "kind")}


def _commands(
    reader: RunReader, plan: Mapping[str, Any], findings: Sequence[Finding]
) -> list[dict[str, str]]:
    """Everything needed to repeat what the report says, in the order in which it was done."""
    run = shlex.quote(str(reader.dir.path))
    typed = plan.get("command", ())
    commands = [("the run", typed if isinstance(typed, str) else shlex.join(typed))]
    commands += [("a check", finding.command) for finding in findings]
    failing = bundle_of_failure(reader.dir)
    commands += [
        (
            "the failing step" if bundle == failing else "a step that failed",
            f"fourfold replay {shlex.quote(str(bundle))}",
        )
        for bundle in sorted(bundles(reader.dir), key=lambda bundle: bundle != failing)
    ]
    commands.append(("this report", f"fourfold report {run}"))
    once = {command: what for what, command in reversed(commands) if command}
    return [{"repeats": what, "command": command} for command, what in reversed(once.items())]


def _at(values: Any, key: str) -> Any:
    """The value at a dotted key; "n/a" if the key is not one of the resolved request."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return "n/a"
        values = values[part]
    return values
