"""A folder that may not be written, for root too."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def forbidden(folder: Path) -> Iterator[None]:
    """Nothing can be made in a folder: by its permissions or, for root, to whom they mean nothing, by its flag."""
    if os.geteuid():
        folder.chmod(0o555)
    elif subprocess.run(["chattr", "+i", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no flag that forbids root to write")
    try:
        yield
    finally:
        if os.geteuid():
            folder.chmod(0o755)
        else:
            subprocess.run(["chattr", "-i", str(folder)], check=True)
