"""What a rank does in a run of the suite: the trainer's own loop, and a note of the step that it is in."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch.distributed as dist

from fourfold.collectives.fingerprints import Fingerprints
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan
from fourfold.record.calls import CALLS, CallsFile
from fourfold.record.run_dir import RunDir
from fourfold.train import loop
from fourfold.verify.here import joined_here


def at_file(folder: Path, rank: int) -> Path:
    """Where a rank notes the step (from 1; 0: before the first) and the phase that it has come to."""
    return folder / f"at-{rank}.txt"


def trained(plan: RunPlan, folder: str) -> str:
    """Train as planned in `folder`; how the loop ended. Raises what it raises. Collectives: those of the loop.

    Collectives are noted and compared as in every run. No watchdog ends it: a rank of a pool has nobody to tell.
    """
    rank = dist.get_rank()
    note = at_file(Path(folder), rank)
    calls = Fingerprints(CallsFile(Path(folder) / CALLS, rank))

    def beat(step: int, phase: str, patient: bool = False) -> None:  # noqa: ARG001
        note.write_text(f"{step} {phase}")

    with redirect_stderr(io.StringIO()), StopRequest() as stop, calls.kept():
        return loop.train(plan, joined_here(), RunDir(Path(folder)), stop, beat, calls=calls)
