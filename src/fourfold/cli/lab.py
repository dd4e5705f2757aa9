"""`fourfold lab`: the experiments."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cyclopts import App

from fourfold.cli.output import next_command, paint, print_document
from fourfold.spec.errors import EXIT_CHECK_FAILED, EXIT_DONE

app = App(
    name="lab",
    help="""The experiments and the demonstration.

    Examples:

        fourfold lab coverage
        fourfold lab coverage --json
        fourfold lab coverage --out my-lab
    """,
)


@app.command
def coverage(*, out: Path | None = None, json: bool = False) -> int:
    """Two ranks print their sample ids: nothing double, nothing missing; then each classic mistake is switched on.

    Examples:

        fourfold lab coverage
        fourfold lab coverage --json
        fourfold lab coverage --out my-lab

    Parameters
    ----------
    out
        A folder for the findings (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.lab.coverage import lab_coverage

    document = lab_coverage(out=out)
    if json:
        print_document(document)
    else:
        print("\n".join(coverage_lines(document)))
    next_command("fourfold verify coverage tiny --world 2")
    return EXIT_DONE if document["verdict"] == "pass" else EXIT_CHECK_FAILED


def coverage_lines(document: Mapping[str, Any]) -> list[str]:
    """Every exercise: each rank's ids by epoch (".": a row without a sample), and what the ledger says of them."""
    lines = [
        f"{document['samples']} samples, {document['world']} ranks, ids in the order in which they are read"
    ]
    for entry, finding in zip(document["exercises"], document["findings"], strict=True):
        lines += ["", paint(entry["title"], "bold", sys.stdout)]
        for rank, epochs in enumerate(entry["ids"]):
            for epoch, ids in enumerate(epochs):
                lines.append(f" rank {rank} epoch {epoch + 1}:{_ids(ids)}")
        good = "clean" if entry is document["exercises"][0] else "caught"
        verdict = good if finding["verdict"] == "pass" else f"NOT {good}"
        lines.append(f" ledger: {finding['measured']}  -> {verdict}")
    return [*lines, "", f"{document['verdict']}  {document['findings_file']}"]


def _ids(ids: Sequence[int]) -> str:
    return "".join(f" {'.' if i < 0 else i:>2}" for i in ids)
