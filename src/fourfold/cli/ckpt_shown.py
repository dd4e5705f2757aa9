"""Checkpoints in words: tables of at most 80 columns, totals first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.output import table
from fourfold.spec.words import counted

if TYPE_CHECKING:
    from fourfold.checkpoint.listing import Entry, Listing


def listing_shown(listing: Listing) -> str:
    """All that lies in a ckpt folder: totals, a line for each folder, and why some are not whole."""
    valid = listing.of("valid")
    newest = next((entry for entry in valid if entry.path == listing.newest_valid), None)
    held = f"{len(valid)} valid, {size(sum(entry.bytes for entry in valid))}"
    for state in ("damaged", "saving", "unfinished", "set aside"):
        if found := listing.of(state):
            held += f"; {len(found)} {state}, {size(sum(entry.bytes for entry in found))}"
    stands = (
        f"step {newest.step:,}, after {counted(newest.position or 0, 'sample', ',')}" if newest else "none"
    )
    totals = table(("path", listing.ckpt_dir), [("checkpoints", held), ("newest", stands)])
    rows = [_entry_row(entry, entry is newest) for entry in listing.entries]
    text = f"{totals}\n\n{table(('', 'step', 'saved, UTC', 'samples', 'size', 'folder'), rows)}"
    wrong = [(entry.state, f"{Path(entry.path).name}: {entry.why}") for entry in listing.entries if entry.why]
    if wrong:
        text += f"\n\n{table(('', 'why'), wrong)}"
    return f"{text}\n\nBy manifest, size and header; hashes are not checked here."


def description_shown(told: dict[str, Any], tensors: bool) -> str:
    """What one checkpoint holds: totals, and if asked for a line for each tensor."""
    layout = ", ".join(f"{key} {value}" for key, value in told["layout"].items())
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    kinds = told["by_kind"].items()
    rows = [
        ("step", f"{told['step']:,}, after {counted(told['position'], 'sample', ',')}"),
        ("world", f"{counted(told['world'], 'rank')}; {layout}"),
        ("saved", f"{_clock(told['created'], '%Y-%m-%d %H:%M:%S')} UTC by {versions}"),
        ("size", f"{size(told['bytes'])} in {counted(len(told['files']), 'file')}"),
        ("tensors", f"{len(told['tensors']):,}"),
        *((f"  {kind}", f"{held['tensors']:,}, {size(held['bytes'])}") for kind, held in kinds),
        ("spec hash", told["spec_hash"]),
        ("data hash", told["data_hash"]),
    ]
    text = table(("path", told["path"]), rows)
    if tensors:
        listed = table(("dtype", "chunks", "size", "tensor"), [_tensor_row(row) for row in told["tensors"]])
        text += f"\n\n{listed}"
    return text


def size(count: float | None) -> str:
    """Bytes, for people; "n/a" where they are not known."""
    if count is None:
        return "n/a"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _entry_row(entry: Entry, newest: bool) -> Sequence[str]:
    return (
        "newest" if newest else entry.state,
        "n/a" if entry.step is None else str(entry.step),
        "n/a" if entry.created is None else _clock(entry.created, "%Y-%m-%d %H:%M"),
        "n/a" if entry.position is None else f"{entry.position:,}",
        size(entry.bytes),
        Path(entry.path).name,
    )


def _tensor_row(row: dict[str, Any]) -> Sequence[str]:
    return (row["dtype"], str(row["chunks"]), size(row["bytes"]), f"{row['name']} {row['shape']}")


def _clock(unix_s: float, form: str) -> str:
    return time.strftime(form, time.gmtime(unix_s))
