"""The report's page: numbers put into words, and the template filled in."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from fourfold.lab.loss_curve import NARROW, WIDE, loss_curve, points_per_mark
from fourfold.lab.report_course import course
from fourfold.lab.report_words import shown
from fourfold.spec.model import ModelSpec

Row = tuple[str, str]

_KINDS = {
    "fact": "measured in this run",
    "inference": "follows from facts",
    "open": "not tested here",
}
_NAMES = {
    "world": "ranks",
    "nproc": "ranks on this machine",
    "parameter_terms": "parameters by part",
    "state_bytes": "memory of the training state",
    "gradient_bytes_per_step": "gradients sent by a rank per step",
    "cpu": "CPU",
    "memory_bytes": "memory",
    "source_hash": "source hash (xxh3-128)",
}


def render(report: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]], model: ModelSpec) -> str:
    """The whole HTML page: styles and drawing inline, every text escaped, no request to anywhere."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    lines = list(metrics)
    training = [(int(line["step"]), float(line["loss"])) for line in lines if "loss" in line]
    validation = [
        (int(line["step"]), float(line["validation_loss"])) for line in lines if "validation_loss" in line
    ]
    unit = loss_unit(model)
    pages = Environment(
        loader=PackageLoader("fourfold.lab", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["whole_numbers"] = _whole_numbers
    return pages.get_template("report.html.j2").render(
        report=report,
        tiles=_tiles(report["summary"]),
        wide_curve=Markup(loss_curve(training, validation, unit, WIDE)) if training else "",
        narrow_curve=Markup(loss_curve(training, validation, unit, NARROW)) if training else "",
        curve_notes=_curve_notes(training, validation, unit),
        course=course(report),
        kinds=_by_kind(report["findings"]),
        asked=[(row["key"], shown(row["key"], row["value"]), row["from"]) for row in report["asked"]],
        predicted=_predicted(report["plan"]),
        environment=_environment(report["environment"]),
    )


def loss_unit(model: ModelSpec) -> str:
    """What the loss counts: cross-entropy is in nats, for its logarithm is the natural one."""
    if model.kind == "decoder":
        return "nats per target token"
    if model.kind == "mlp":
        return "nats per sample" if model.task == "classification" else "mean squared error"
    return "as the model defines it"


def _clock(unix_s: float | str) -> str:
    """To the second, in UTC: the same words wherever the report is read."""
    if isinstance(unix_s, str):
        return unix_s
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _tiles(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(name, figure, note) of the numbers that stand at the top."""

    def loss(key: str) -> str:
        return f"{summary[key]:.4f}" if isinstance(summary[key], float) else str(summary[key])

    def rate(key: str) -> str:
        return f"{summary[key]:,.0f}" if isinstance(summary[key], float) else str(summary[key])

    agree = {True: "the same on every rank", False: "NOT the same on every rank"}.get(
        summary["steps_agree"], ""
    )
    per_rank = (
        f"by rank: {', '.join(map(str, summary['steps_by_rank']))}" if summary["steps_agree"] is False else ""
    )
    return [
        (
            "steps",
            f"{summary['steps_done']:,}",
            "; ".join(filter(None, [f"of {summary['steps_asked']:,}", agree, per_rank])),
        ),
        ("training loss", loss("last_loss"), f"first {loss('first_loss')}, best {loss('best_loss')}"),
        ("validation loss", loss("validation_loss"), "the last one measured"),
        (
            "tokens per second",
            rate("tokens_per_s"),
            f"{rate('nonpadding_per_s')} without padding, {rate('loss_tokens_per_s')} bearing loss",
        ),
        ("wall time", shown("wall_s", summary["wall_s"]), f"from {_clock(summary['started'])}"),
        ("ended", summary["ended"], summary["ended_why"]),
    ]


def _curve_notes(
    training: Sequence[tuple[int, float]], validation: Sequence[tuple[int, float]], unit: str
) -> list[str]:
    notes = [f"Loss in {unit}, summed over all ranks and divided by the count over all ranks."]
    size = points_per_mark(len(training))
    if size > 1:
        notes.append(f"Each point of the line is the mean of {size} steps.")
    lost = [step for step, loss in training if not math.isfinite(loss)]
    if lost:
        notes.append(f"Not finite, and so not drawn, at {len(lost)} steps, first at step {lost[0]}.")
    if not validation:
        notes.append("No validation was recorded.")
    return notes


def _by_kind(findings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[Mapping[str, Any]]]]:
    groups = ((kind, words, [f for f in findings if f["kind"] == kind]) for kind, words in _KINDS.items())
    return [group for group in groups if group[2]]


def _predicted(plan: Mapping[str, Any]) -> list[Row]:
    aside = ("schema", "notes", "not_predicted")
    return [
        (_words(key), shown(key, value))
        for key, value in plan.items()
        if key not in aside and value is not None
    ]


def _environment(env: Mapping[str, Any]) -> list[Row]:
    rows = {**env}
    if "git" in rows:
        rows["git"] = _git(rows["git"])
    return [(_words(key), shown(key, value)) for key, value in rows.items()]


def _git(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "not in a git checkout"
    changed = "with changes not committed" if state["dirty"] else "no changes to tracked files"
    return f"{state['commit']}, {changed}, {state['untracked_files']} untracked files"


def _whole_numbers(text: str) -> Markup:
    """Escaped, and no line ends inside a number such as 1e-12."""
    return Markup(re.sub(r"\S*\de-\d\S*", r'<span class="whole">\g<0></span>', str(escape(text))))


def _words(key: str) -> str:
    return _NAMES.get(key, key.replace("_", " "))
