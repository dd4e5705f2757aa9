"""Take back what a run wrote after the point from which it goes on."""

from __future__ import annotations

import os
from pathlib import Path

from fourfold.record.reader import read_lines
from fourfold.record.writer import dumps, write_text


def keep_lines_until(path: Path | str, step: int) -> None:
    """Rewrite a file of JSON lines without those of a later step than `step`; whole or not at all."""
    if os.path.exists(path):
        kept = [dumps(line) for line in read_lines(path) if line.get("step", 0) <= step]
        write_text(path, "".join(line + "\n" for line in kept))
