"""Where a check writes its findings, and keeps its runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourfold.record.problems import unwritable
from fourfold.record.run_dir import RunDir, absent, claim_next, remove_empty
from fourfold.spec.errors import DataError, SpecError

RUNS = Path("runs")


@contextmanager
def open_folder(out: Path | None, name: str) -> Iterator[RunDir]:
    """The folder `out`, a run directory or not, there or not; without one, the next free runs/verify-<name>-<n>.

    What ends the check within leaves no empty folder that was made for it. Raises DataError if it cannot be made.
    """
    if out is None:
        folder = claim_next(RUNS, f"verify-{name}")
        made = (folder.path, *folder.around)
    else:
        folder, made = RunDir(out), absent(out)
    try:
        _make(folder.path)
        yield folder
    except BaseException:
        remove_empty(made)
        raise


@contextmanager
def open_room(folder: RunDir, name: str) -> Iterator[Path]:
    """A folder of its own in it, <name>-<n>, for runs. What is refused within leaves none: no check has failed."""
    room = claim_next(folder.path, name).path
    try:
        yield room
    except (SpecError, DataError):
        shutil.rmtree(room, ignore_errors=True)
        raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, elsewhere = "make the folder for the findings", "--out ANOTHER/PLACE"
        raise unwritable(folder, error, what, "nothing was written", elsewhere) from error
