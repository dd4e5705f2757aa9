"""What `fourfold lab device` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fourfold.cli.output import table, wrapped
from fourfold.cli.verify import findings_table


def device_lines(document: Mapping[str, Any]) -> list[str]:
    """Every finding, then the step times, and memory beside what the allocator took."""
    memory = document["memory"]
    rows = [
        [entry["title"], f"{entry['step_s'] * 1e3:.1f}", f"{entry['tokens_per_s']:,.0f}"]
        for entry in document["step"]
    ]
    peak = memory["peak_allocated_bytes"]
    told = (
        f"memory of the tiny model: {memory['state_bytes']:,} bytes of state after a step, "
        f"{memory['activation_bytes']:,} kept by a microbatch's forward"
        + (f", {peak:,} at most allocated at one time" if peak is not None else "")
    )
    return [
        document["device_name"],
        "",
        *findings_table(document["findings"]).splitlines(),
        "",
        *table(["step of small", "ms", "tokens/s"], rows).splitlines(),
        "",
        *wrapped(told, 0),
        "",
        f"{document['verdict']}  {document['findings_file']}",
        f"runs  {document['folder']}",
    ]
