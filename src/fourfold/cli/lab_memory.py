"""How `fourfold lab memory` prints its document: a table for each layout, in bytes per parameter."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.cli.output import paint, table, wrapped

COLUMNS = ("parameters", "gathered", "gradients", "moments", "buffers")
HEADS = ("param", "gathered", "grad", "moments", "buffers", "held", "predicted")
WIDTHS = (6, 9, 7, 8, 8, 8, 10)
LEGEND = (
    ("param", "parameters that the rank owns: all, or its shard"),
    ("gathered", "whole copies of sharded parameters"),
    ("grad", "gradients: whole, or sharded"),
    ("moments", "AdamW's two: running means of the gradient and of its square"),
    ("buffers", "memory of communication between ranks"),
    ("held", "all of these, and AdamW's step counters (4 bytes a tensor)"),
    ("predicted", "held, computed from Spec and layout alone"),
)
BESIDES = {
    "activations": "activations: kept by a microbatch for its backward",
    "gathered": "gathered, at its most in a step: more than above",
    "gradients": "grad, at its most in a step: more than above",
    "buffers": "buffers, at their most in a step: more than above",
    "process": "the process grew by this beyond its state: data loader, what the allocator keeps, first use of code",
}
NEW = " (much of it, as these processes are new)"
LEAST_BYTES = 0.005 * 2**20  # what prints as more than 0.00 MiB


def memory_lines(document: Mapping[str, Any]) -> list[str]:
    """Every layout: what rank 0 holds at each instant, the prediction, the textbook, and what is in neither."""
    count = document["parameters"]
    lines = [
        f"{count:,} parameters of {document['element_bytes']} bytes each, on {document['world']} ranks",
        "the tables: bytes per parameter on rank 0, counted from the tensors' storages",
        *(f" {name:<11}{meaning}" for name, meaning in LEGEND),
    ]
    for entry in document["layouts"]:
        lines += ["", *_layout(entry, count)]
    shown = [f for f in document["findings"] if f["verdict"] != "pass" or f["kind"] == "inference"]
    lines += [""] if shown else []
    for finding in shown:
        word = {"fail": "failed", "open": "not tested"}.get(finding["verdict"], finding["kind"])
        told = f"{word}: {finding['claim']}: {finding['measured']}"
        lines += wrapped(told + (f" ({finding['would_test']})" if finding.get("would_test") else ""), 0)
    return [*lines, "", f"{document['verdict']}  {document['findings_file']}"]


def _layout(entry: Mapping[str, Any], count: int) -> list[str]:
    lines = [paint(entry["title"], "bold", sys.stdout), _row("", HEADS)]
    for at in entry["instants"]:
        held = [at["measured"][category] for category in COLUMNS]
        figures = [*held, at["measured_bytes"], at["predicted_bytes"]]
        lines.append(_row(at["instant"], [f"{figure / count:.2f}" for figure in figures]))
    lines += wrapped(
        f"textbook: {entry['textbook_bytes_per_parameter']:.2f} at most, in the precision of this run "
        f"({entry['mixed_textbook_bytes_per_parameter']:.2f} with 2-byte parameters and gradients). "
        f"Here: {entry['beyond_textbook']}"
    )
    besides = [
        [
            f"  {part['bytes'] / 2**20:.2f}",
            f"{part['bytes'] / count:.2f}" if part["what"] != "process" else "-",
            BESIDES[part["what"]] + (NEW if part["what"] == "process" and entry["new_processes"] else ""),
        ]
        for part in entry["omitted"]
        if part["bytes"] >= LEAST_BYTES
    ]
    heads = ["  MiB", "bytes/param", "on the rank with most of it"]
    lines += [" held as well, in no column and in no prediction:", *table(heads, besides).splitlines()]
    return [*lines, f" -> {'as predicted' if entry['verdict'] == 'pass' else 'NOT as predicted'}"]


def _row(name: str, cells: Sequence[str]) -> str:
    text = "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return f" {name:<21}{text}".rstrip()
