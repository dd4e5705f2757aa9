"""How `fourfold lab order` prints its document: each mistake, what torch says of it alone, and what is named here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fourfold.cli.output import paint, wrapped


def order_lines(document: Mapping[str, Any]) -> list[str]:
    """A paragraph a mistake: of what is said here, all but the advice."""
    lines = [
        f"{document['world']} ranks, the last makes the mistake; a collective waits {document['timeout_s']:g} s"
    ]
    for entry, finding in zip(document["mistakes"], document["findings"], strict=True):
        alone, told = entry["torch_alone"].splitlines(), entry["fourfold"].splitlines()
        lines += ["", paint(entry["title"], "bold", sys.stdout)]
        lines += wrapped(f"torch alone: {alone[0] if alone else 'every sum is right'}")
        lines += wrapped(f"fourfold: {told[0] if told else 'every sum is right'}")
        for line in told[1:]:
            if not line.startswith(("  why:", "  type:")):
                lines += wrapped(line.strip(), 2)
        verdict = finding["measured"] if finding["verdict"] == "pass" else f"FAILED: {finding['measured']}"
        lines += wrapped(f"-> {verdict}")
    return [*lines, "", f"{document['verdict']}  {document['findings_file']}"]
