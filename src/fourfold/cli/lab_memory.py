"""How `fourfold lab memory` prints its document: a table for each layout, in bytes per parameter."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.cli.output import paint, wrapped

COLUMNS = ("parameters", "gathered", "gradients", "moments", "buffers")
HEADS = ("param", "gathered", "grad", "moments", "buffers", "held", "predicted")
WIDTHS = (6, 9, 7, 8, 8, 8, 10)


def memory_lines(document: Mapping[str, Any]) -> list[str]:
    """Every layout: what rank 0 holds at each instant, the prediction, the textbook, and what is in neither."""
    count = document["parameters"]
    lines = [
        f"{count:,} parameters of {document['element_bytes']} bytes on {document['world']} ranks",
        "bytes per parameter on rank 0, counted from storages:",
    ]
    for entry in document["layouts"]:
        lines += ["", paint(entry["title"], "bold", sys.stdout), _row("", HEADS)]
        for at in entry["instants"]:
            held = [at["measured"][category] for category in COLUMNS]
            figures = [*held, at["measured_bytes"], at["predicted_bytes"]]
            lines.append(_row(at["instant"], [f"{figure / count:.2f}" for figure in figures]))
        lines += wrapped(
            f"textbook: {entry['textbook_bytes_per_parameter']:.2f} at most "
            f"({entry['mixed_textbook_bytes_per_parameter']:.2f} in mixed precision); {entry['beyond_textbook']}"
        )
        lines += wrapped(
            "not in it: "
            + ", ".join(
                f"{part['what']} {part['bytes'] / 2**20:.2f} MiB"
                for part in entry["omitted"]
                if part["bytes"] >= 0.005 * 2**20
            )
        )
        lines.append(f" -> {'as predicted' if entry['verdict'] == 'pass' else 'NOT as predicted'}")
    shown = [f for f in document["findings"] if f["verdict"] != "pass" or f["kind"] == "inference"]
    lines += [""] if shown else []
    for finding in shown:
        word = {"fail": "failed", "open": "open"}.get(finding["verdict"], finding["kind"])
        told = f"{word}: {finding['claim']}: {finding['measured']}"
        lines += wrapped(told + (f" ({finding['would_test']})" if finding.get("would_test") else ""), 0)
    return [*lines, "", f"{document['verdict']}  {document['findings_file']}"]


def _row(name: str, cells: Sequence[str]) -> str:
    text = "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return f" {name:<21}{text}".rstrip()
