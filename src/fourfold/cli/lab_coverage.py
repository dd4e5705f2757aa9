"""How `fourfold lab coverage` prints its document."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.cli.output import paint


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
