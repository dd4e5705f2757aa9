"""Saving a run between two steps, and putting it back: the same parameters, moments, streams, position and loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from fourfold.checkpoint.load import load
from fourfold.checkpoint.manifest import Manifest
from fourfold.checkpoint.save import SaveFacts, save
from fourfold.checkpoint.validate import read_manifest
from fourfold.collectives.sums import sum_floats
from fourfold.data.batch import Batch
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import CheckFailed, Problem
from fourfold.train.precision import autocast
from fourfold.train.setup import Training
from fourfold.train.state import make_room, tensors_of
from fourfold.train.streams import restore_streams


def save_state(training: Training, run: RunDir, step: int, batches: Sequence[Batch]) -> Path:
    """Save the run as it is after `step` (from 0), whose microbatches on this rank are `batches`.

    The loss of that batch under the saved parameters goes with it: `load_state` holds it against its own.
    Collectives: those of `checkpoint.save`, and one small sum.
    Raises DataError on every rank if any rank could not write.
    """
    spec = training.spec
    training.beat(step + 1, "save", True)
    facts = SaveFacts(
        step=step + 1,
        position=training.schedule.position(step + 1),
        layout=spec.layout.model_dump(mode="json"),
        spec_hash=str(xxhash.xxh3_128_hexdigest(spec.model_dump_json().encode())),
        data_hash=training.sources.content_hash,
    )
    state = {"spec": spec.model_dump(mode="json"), "probe_loss": _probe_loss(training, batches).hex()}
    return save(tensors_of(training), state, run.checkpoints, facts)


def load_state(training: Training, folder: Path) -> int:
    """Put a checkpoint's state back; returns the step (from 0) that comes next.

    Collectives: those of `checkpoint.load`, and one small sum.
    Raises DataError for a checkpoint that cannot be read or holds other entries, CheckFailed if the last batch's loss
    is not, bit for bit, the one that was saved.
    """
    manifest = read_manifest(folder)
    rank = training.joined.rank.rank
    others = [
        name for name in manifest.tensors if name.startswith("rank") and not name.startswith(f"rank{rank}.")
    ]
    tensors = make_room(training, manifest.tensors)
    state = load(folder, tensors, allow_surplus=others)
    restore_streams(rank, tensors)
    _check_probe(training, manifest, float.fromhex(state["probe_loss"]), folder)
    return manifest.step


def _check_probe(training: Training, manifest: Manifest, saved: float, folder: Path) -> None:
    found = _probe_loss(training, next(training.loader.steps(manifest.step - 1, manifest.step)))
    if found != saved:
        raise CheckFailed(
            Problem(
                asked=f"the loss of step {manifest.step}'s batch as {folder} has it: {saved!r}",
                found=f"{found!r}",
                why="parameters, data or the computation are not what they were when it was saved",
                instead="the code, the data and the number of threads of that run; see its env.json",
            )
        )


@torch.no_grad()
def _probe_loss(training: Training, batches: Sequence[Batch]) -> float:
    """Global loss sum of these microbatches under the present parameters, dropout off: nothing is changed by it."""
    float_dtype = training.dtype if training.dtype is torch.float64 else None
    total = torch.zeros(1, dtype=torch.float64, device=training.device)
    training.model.eval()
    try:
        for batch in batches:
            with autocast(training.spec.precision, training.device):
                loss_sum, _ = training.loss_module(batch.to(training.device, float_dtype))
            total += loss_sum.double()
    finally:
        training.model.train()
    return float(sum_floats(total)[0])
