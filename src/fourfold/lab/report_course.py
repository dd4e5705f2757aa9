"""The course of a run in words: its attempts, what was saved, what the breaks cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.lab.report_words import count, shown

Row = tuple[str, str]

_MANY = 12  # attempts, or folders, all told


def course(report: Mapping[str, Any]) -> list[Row]:
    """(what, how it was), in order: attempts, time lost, saves, checkpoints on disk. Nothing of a run without any."""
    history, shelf = report["history"], report["checkpoints"]
    several = len({one["ranks"] for one in history["attempts"] if one["ranks"]}) > 1
    rows = [(f"attempt {one['number']}", _attempt(one, several)) for one in history["attempts"]]
    broken = len(rows) > 1
    if not broken and not (history["saved"] or history["not_saved"] or shelf["checkpoints"]):
        return rows if any(one["ending"] != "finished" for one in history["attempts"]) else []
    rows = _few(rows, "attempts")
    if broken:
        lost = f"{shown('lost_s', history['lost_s'])} from the end of an attempt to the next one's first step"
        rows.append(("time lost", f"{lost}; {count(history['steps_again'], 'step')} done again"))
    rows.append(("saved", _saved(history["saved"])))
    not_saved = [(f"step {one['step']}", _first_line(one["error"])) for one in history["not_saved"]]
    rows += [("not saved", f"{step}: {why}") for step, why in _few(not_saved, "saves")]
    passed = [(Path(one["path"]).name, one["why"]) for one in history["passed_over"]]
    rows += [("passed over", f"{name}: {why}") for name, why in _few(passed, "folders")]
    rows.append(("on disk", _on_disk(shelf)))
    wrong = [(one["state"], one) for one in shelf["checkpoints"] if one["why"]]
    rows += [(state, f"{Path(one['path']).name}: {one['why']}") for state, one in wrong[:_MANY]]
    return rows


def _attempt(one: Mapping[str, Any], several: bool) -> str:
    """several: whether attempts were on different numbers of ranks."""
    if one["after_step"] is None:
        text = "came to no step"
    elif one["reached"] == one["after_step"]:
        text = f"no step after {one['after_step']}"
    else:
        first, last = one["after_step"] + 1, one["reached"]
        text = f"step {first}" if first == last else f"steps {first}-{last}"
    if several and one["ranks"]:
        text += f" on {count(one['ranks'], 'rank')}"
    text += f"; {one['ending']}"
    if one["why"] and one["why"] not in one["then"]:
        text += f": {one['why']}"
    if one["then"]:
        text += f"; {one['then']}"
    if one["lost_s"] is not None:
        text += f" (took up the run {shown('lost_s', one['lost_s'])} after the end of the one before)"
    return text


def _saved(saved: Sequence[Mapping[str, Any]]) -> str:
    if not saved:
        return "nothing"
    seconds = [one["seconds"] for one in saved if one["seconds"] is not None]
    each = f", {shown('_s', statistics.median(seconds))} each (median)" if seconds else ""
    return f"{count(len(saved), 'checkpoint')}, the last of step {saved[-1]['step']}{each}"


def _on_disk(shelf: Mapping[str, Any]) -> str:
    newest = [one["step"] for one in shelf["checkpoints"] if one["path"] == shelf["newest_valid"]]
    stands = f", the newest of step {newest[0]}" if newest else ""
    return (
        f"{shelf['valid']} valid{stands}; {shown('bytes', shelf['bytes'])} in all (hashes not checked here)"
    )


def _few(rows: list[Row], what: str) -> list[Row]:
    """All, or the first two and the last ones."""
    if len(rows) <= _MANY:
        return rows
    left = len(rows) - _MANY + 1
    return [*rows[:2], ("…", f"{left} more {what}, in report.json"), *rows[3 - _MANY :]]


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2])
