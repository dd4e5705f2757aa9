"""The four parts of what is wrong with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from fourfold.spec.errors import Problem


def damaged(folder: Path, part: str, found: str, why: str, instead: str = "") -> Problem:
    """A part of a checkpoint (a file, a tensor) that is not as it was saved; `instead`: else where to find another."""
    another = f"fourfold ckpt validate {quote(str(folder.parent))}  (tells which checkpoint is whole)"
    return Problem(asked=part, found=found, why=why, instead=instead or another, where=str(folder))
