"""Whether somebody still works in a folder: an advisory lock that ends with the process that took it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourfold.record.lock import is_held


@contextmanager
def holding(folder: Path | str) -> Iterator[None]:
    """Mark a folder as in use by this process; several may hold one. OSError where it cannot be opened or locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def in_use(folder: Path | str) -> bool:
    """Whether some process holds the folder; True too where that cannot be told."""
    return is_held(folder, fcntl.LOCK_EX, unknown=True)
