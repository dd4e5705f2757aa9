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
        *wrapped(
            f"a small decoder of {document['parameters']:,} parameters on real text, on one rank: {document['steps']} "
            f"steps of {document['tokens_per_step']} tokens",
            0,
        ),
        "",
        *_curves(runs, document["steps"]),
        "",
        *_scales(runs, document["steps"], document["scale_every"]),
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
    rows = [[run["title"], *(f"{float(run['losses'][step - 1]):.4f}" for step in shown)] for run in runs]
    head = "training loss of single steps, nats per target token"
    return [head, *table(["", *(f"step {step}" for step in shown)], rows).splitlines()]


def _scales(runs: Sequence[Mapping[str, Any]], steps: int, every: int) -> list[str]:
    rows = []
    for run in runs:
        scales = [scale for scale in run["scales"] if scale is not None]
        skipped = ", ".join(f"step {step}" for step in run["skipped_steps"]) or "none"
        figures = [f"{scale:,.0f}" for scale in (scales[0], max(scales), scales[-1])] if scales else ["-"] * 3
        rows.append([run["title"], *figures, skipped])
    told = (
        f'loss scale: what the loss is multiplied by before backward; "scaled" doubles it after {every} updates in a '
        "row, and halves it after a step whose gradient overflows, which makes no update"
    )
    heads = ["", "in step 1", "at most", f"in step {steps}", "steps without an update"]
    return [*wrapped(told, 0), *table(heads, rows).splitlines()]


def _sizes(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            run["title"],
            *(f"{run['bytes'][what]:,}" for what in ("parameters", "moments", "kept")),
            f"{run['tokens_per_s']:,.0f}",
        ]
        for run in runs
    ]
    told = (
        "memory in bytes: the parameters that AdamW updates, its two moments, and what a microbatch's forward keeps "
        "for its backward; speed on this machine, the median of the later steps"
    )
    heads = ["", "parameters", "moments", "kept for backward", "tokens/s"]
    return [*wrapped(told, 0), *table(heads, rows).splitlines()]


def _gradients(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    tokens = runs[0]["gradient_in_a_large_batch"]["tokens"]
    rows = []
    for run in runs:
        of = run["gradient_in_a_large_batch"]
        rows.append([run["title"], f"{of['vanished']:.1%}", f"{of['gap']:.1e}" if of["gap"] else "0"])
    told = (
        f"gradient of one microbatch, divided as in a step of {tokens:,} tokens: the share of its elements that are 0, "
        "and the norm of its difference from fp32's, over the norm of fp32's"
    )
    return [
        *wrapped(told, 0),
        *table(["", "elements that are 0", "difference from fp32's"], rows).splitlines(),
    ]
