"""A user's own code, named in a Spec as "package.module:name": where it is found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def look_here_first() -> Path:
    """Put the working directory first on the import path, as `python -m` has it; returns it."""
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    return here


def source_file(target: str) -> Path | None:
    """The file of the target's module, which is not imported (its parents are); None if there is none."""
    look_here_first()
    try:
        found = importlib.util.find_spec(target.partition(":")[0])
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return None
    return Path(found.origin)
