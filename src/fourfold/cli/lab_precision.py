"""What `fourfold lab precision` prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.cli.output import paint, table, wrapped

_SHOWN = 5  # steps of a loss curve


def precision_lines(document: Mapping[str, Any]) -> list[str]:
    """The precisions beside each other, then every mistake: what comes of it, and what the product says."""
    runs = document["runs"]
    lines = [
        f"a small decoder on real text, {document['steps']} steps",
        "",
        *_curves(runs, document["steps"]),
        "",
        *_sizes(runs),
        "",
        *_gradients(runs),
    ]
    for entry in document["mistakes"]:
        lines += ["", paint(entry["title"], "bold", sys.stdout), *wrapped(entry["why"], 0)]
        lines += [line for text in entry["seen"] for line in wrapped(text)]
        lines += [line for text in entry["fourfold"] for line in wrapped(f"Fourfold: {text}")]
        lines.append(f" -> {'caught' if entry['verdict'] == 'pass' else 'NOT caught'}")
    for finding in document["findings"]:
        if finding["verdict"] != "pass":
            kind = "failed" if finding["verdict"] == "fail" else "not tested"
            lines += ["", *wrapped(f"{kind}: {finding['claim']}: {finding['measured']}", 0)]
    return [*lines, "", f"{document['verdict']}  {document['findings_file']}", f"runs  {document['folder']}"]


def _curves(runs: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    shown = [round(1 + at * (steps - 1) / (_SHOWN - 1)) for at in range(_SHOWN)]
    rows = [
        [
            run["title"],
            *(f"{float(run['losses'][step - 1]):.4f}" for step in shown),
            ", ".join(map(str, run["skipped_steps"])) or "none",
        ]
        for run in runs
    ]
    return table(["loss", *(f"step {step}" for step in shown), "steps skipped"], rows).splitlines()


def _sizes(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            run["title"],
            *(f"{run['bytes'][what]:,}" for what in ("parameters", "moments", "kept")),
            f"{run['tokens_per_s']:,.0f}",
        ]
        for run in runs
    ]
    return table(["bytes", "parameters", "moments", "kept for backward", "tokens/s here"], rows).splitlines()


def _gradients(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    tokens = runs[0]["gradient_in_a_large_batch"]["tokens"]
    rows = []
    for run in runs:
        of = run["gradient_in_a_large_batch"]
        rows.append([run["title"], f"{of['vanished']:.1%}", f"{of['gap']:.1e}" if of["gap"] else "0"])
    head = f"one microbatch's gradient, were its step one of {tokens:,} tokens"
    return [head, *table(["", "vanished", "off fp32's, of its norm"], rows).splitlines()]
