"""Where a check writes its findings."""

from __future__ import annotations

from pathlib import Path

from fourfold.record.problems import unwritable
from fourfold.record.run_dir import RunDir, claim_next

RUNS = Path("runs")


def open_folder(out: Path | None, name: str) -> RunDir:
    """The folder `out`, a run directory or not, there or not; without one, the next free runs/verify-<name>-<n>.

    Raises DataError if it cannot be made.
    """
    if out is None:
        return claim_next(RUNS, f"verify-{name}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, elsewhere = "make the folder for the findings", "--out ANOTHER/PLACE"
        raise unwritable(out, error, what, "nothing was written", elsewhere) from error
    return RunDir(out)
