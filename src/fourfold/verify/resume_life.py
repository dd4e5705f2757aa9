"""What each rank does in a resume check: one life of a run by the trainer's own loop, or a look at what was loaded."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.data.source import open_sources
from fourfold.launch.stop import StopRequest
from fourfold.models.boxes import box_of
from fourfold.parallel.clip import local
from fourfold.plan.run_plan import RunPlan
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import FourfoldError
from fourfold.train import loop as train_loop
from fourfold.train import saving as train_saving
from fourfold.train import setup as train_setup
from fourfold.train import state as train_state
from fourfold.train.setup import Beat
from fourfold.verify.here import joined_here
from fourfold.verify.resume_course import Interruption, first_samples
from fourfold.verify.resume_tensors import Difference, StoredTensors, difference, same_bits


@dataclass(frozen=True, slots=True)
class Gap:
    """A tensor that is not, on this rank, what the checkpoint holds (`one` there, `other` here); and what it may be."""

    rank: int
    name: str
    difference: Difference
    note: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank has after loading. refused: what the load itself raised, if it did."""

    refused: str
    gaps: tuple[Gap, ...]


def live(plan: RunPlan, samples: int, interruption: Interruption | None) -> str:
    """Run the plan in `run.dir`, on the first `samples` training samples, to its end or to the interruption.

    Returns how the loop ended. Collectives, and what is raised: as of `train.loop.train`.
    """
    assert plan.spec.run.dir is not None, "every life has a run directory"
    sources = first_samples(open_sources(plan.spec), samples)
    # The story of every life is in its log.txt; on the screen only the check's own is told.
    with redirect_stderr(io.StringIO()), StopRequest() as stop:
        run = RunDir(Path(plan.spec.run.dir))
        return train_loop.train(plan, joined_here(), run, stop, _beat(interruption), sources)


def _beat(interruption: Interruption | None) -> Beat:
    """The sign of life that brings the interruption, once, on the last rank."""
    waiting = interruption is not None and dist.get_rank() == dist.get_world_size() - 1

    def beat(step: int, phase: str, patient: bool = False) -> None:  # noqa: ARG001
        nonlocal waiting
        if waiting and interruption is not None and (step, phase) == (interruption.step, interruption.phase):
            waiting = False
            os.kill(os.getpid(), interruption.signal)

    return beat


def look(plan: RunPlan, samples: int) -> Loaded:
    """Load `plan.resume_from` as the loop does, and compare what the training then holds with what the files hold.

    Collectives: those of opening a training, of its warm-up and of `load_state`.
    """
    assert plan.resume_from is not None, "there is a checkpoint to load"
    folder = Path(plan.resume_from)
    sources = first_samples(open_sources(plan.spec), samples)
    with train_setup.open_training(plan.spec, joined_here(), sources=sources) as training:
        train_loop.warm_up(training)
        initial = {name: local(tensor).clone() for name, tensor in train_state.tensors_of(training).items()}
        refused = ""
        try:
            train_saving.load_state(training, folder)
        except FourfoldError as error:
            refused = "; ".join(f"{problem.asked}; found {problem.found}" for problem in error.problems[:3])
        held = train_state.tensors_of(training)
        rank = dist.get_rank()
        stored = StoredTensors(folder)
        gaps = [
            Gap(rank, name, differing, _note(name, held.get(name), stored, initial.get(name)))
            for name in stored.names
            if (not name.startswith("rank") or name.startswith(f"rank{rank}."))
            and (differing := _differing(stored.tensor(name), held.get(name))) is not None
        ]
    return Loaded(refused, tuple(gaps))


def _differing(saved: Tensor, held: Tensor | None) -> Difference | None:
    """In what this rank holds of it; places are counted within that, if it is a part."""
    if held is None:
        return Difference("", "a tensor", "nothing", "")
    if isinstance(held, DTensor) and saved.shape == held.shape:
        saved = saved[box_of(held).slices]
    return None if same_bits(saved, local(held)) else difference(saved, local(held))


def _note(name: str, held: Tensor | None, stored: StoredTensors, initial: Tensor | None) -> str:
    """What a tensor that was not put back is equal to, if it is something simple."""
    if held is None:
        return "it was not put back"
    held = local(held)
    if initial is not None and same_bits(held, initial):
        return "it is what a new run begins with: it was not put back"
    if not bool(held.any()):
        return "all zeros: it was not put back"
    if name.startswith("rank"):
        stream = name.partition(".")[2]
        for other in stored.names:
            if other.partition(".")[2] == stream and other != name and same_bits(held, stored.tensor(other)):
                return f"it is that of {other.partition('.')[0].replace('rank', 'rank ')}"
    return ""
