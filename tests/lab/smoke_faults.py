"""Classic mistakes of resumed runs, for the ranks that a launcher starts: an imported transform's module is what such a
rank imports of a user's own, and here it replaces the product's functions by name. No sample is changed."""

from __future__ import annotations

import os
from typing import Any

_planted = False


def _plant(name: str) -> None:
    global _planted
    if not _planted and "RANK" in os.environ:
        from tests.verify.faults import resume_faults

        getattr(resume_faults, name)()
        _planted = True


def __getattr__(name: str) -> Any:
    """A transform of each fault's name: asked for, it plants the fault."""
    if name.startswith("_"):
        raise AttributeError(name)
    _plant(name)
    return lambda sample, generator: sample  # noqa: ARG005
