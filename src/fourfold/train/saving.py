"""Saving a run between two steps, and putting it back: the same parameters, moments, streams, position and loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import xxhash
from pydantic import ValidationError

from fourfold.checkpoint.load import load, open_together
from fourfold.checkpoint.manifest import STATE, Manifest
from fourfold.checkpoint.problems import damaged
from fourfold.checkpoint.save import SaveFacts, save
from fourfold.collectives.sums import sum_exactly, sum_floats
from fourfold.data.batch import Batch
from fourfold.record.rewind import Mark
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import CheckFailed, DataError, Problem
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted
from fourfold.train.allowed import Allowed, allowed
from fourfold.train.observe import observing
from fourfold.train.precision import autocast
from fourfold.train.resume import differences
from fourfold.train.setup import Training
from fourfold.train.state import PlainState, everywhere, make_room, never_updated, tensors_of
from fourfold.train.streams import restore_streams


@dataclass(frozen=True, slots=True)
class Restored:
    """What was put back. step: the next one, from 0; metrics: up to where the record belongs to it."""

    step: int
    metrics: Mark
    allowed: Allowed


def save_state(training: Training, run: RunDir, step: int, batches: Sequence[Batch], metrics: Mark) -> Path:
    """Save the run as it is after `step` (from 0), whose microbatches on this rank are `batches`.

    The loss of that batch under the saved parameters goes with it: `load_state` holds it against its own.
    metrics: the end of the record so far; rank 0's counts.
    Collectives: those of `checkpoint.save`, of `observing`, of `everywhere`, and one small sum. No rank holds more of
    the state than its own; what is not contiguous passes through a buffer of a few MiB.
    Raises NotSaved on every rank if any rank could not write.
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
    state = PlainState(
        spec=spec.model_dump(mode="json"),
        probe_loss=_probe_loss(training, batches).hex(),
        metrics=metrics,
        never_updated=tuple(everywhere(training, never_updated(training))),
        loss_scale=training.scale.state(),
    )
    return save(
        tensors_of(training),
        state.model_dump(mode="json"),
        run.checkpoints,
        facts,
        writing=lambda: training.beat(step + 1, "save", True),
    )


def load_state(training: Training, folder: Path) -> Restored:
    """Put a checkpoint's state back.

    Collectives: those of `open_together`, of `checkpoint.load`, of `everywhere` and of `observing`, and one small sum.
    Raises DataError for a checkpoint that cannot be read, is of another run (world, Spec, data), or holds other entries
    than the Spec allows; CheckFailed if the last batch's loss is not, bit for bit, the one that was saved.
    """
    training.beat(0, "load", True)
    manifest, told = open_together(folder)
    state = _plain_state(folder, told)
    _check_world(training, manifest, folder)
    _check_spec(training, state, folder)
    _check_data(training, manifest, folder)
    rank = training.joined.rank.rank
    others = {
        name for name in manifest.tensors if name.startswith("rank") and not name.startswith(f"rank{rank}.")
    }
    _restore_scale(training, state, folder)
    tensors = make_room(training, manifest.tensors, state.never_updated)
    new = (
        rank >= manifest.world
    )  # in exact mode there may be more ranks now: nothing is drawn from their streams
    if new:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("rank")}
    leave = allowed(training.spec.checkpoint, manifest.tensors.keys() - others, everywhere(training, tensors))
    load(folder, tensors, allow_missing=leave.initial, allow_surplus=[*others, *leave.left_out])
    batches = next(training.loader.steps(manifest.step - 1, manifest.step))
    if not new:
        restore_streams(rank, tensors)
    if not leave.another_model:
        _check_probe(float.fromhex(state.probe_loss), _probe_loss(training, batches), manifest, folder)
    return Restored(manifest.step, state.metrics, leave)


def _plain_state(folder: Path, told: dict[str, Any]) -> PlainState:
    why = "it was saved by another program, or by a Fourfold that kept other things"
    try:
        state = PlainState.model_validate(told)
    except ValidationError as error:
        raise DataError(damaged(folder, STATE, _told(error), why)) from error
    try:
        float.fromhex(state.probe_loss)
    except (ValueError, OverflowError) as error:
        found = f"probe_loss: {state.probe_loss!r}, no hexadecimal float"
        raise DataError(damaged(folder, STATE, found, why)) from error
    return state


def _restore_scale(training: Training, state: PlainState, folder: Path) -> None:
    if not training.scale.dynamic:
        return
    if state.loss_scale is None:
        why = "fp16 goes on with the scale of its loss: with another one it would skip other steps"
        raise DataError(damaged(folder, STATE, "loss_scale: missing", why))
    training.scale.restore(state.loss_scale)


def _told(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())


def _check_world(training: Training, manifest: Manifest, folder: Path) -> None:
    world = training.joined.rank.world
    if manifest.world != world and not training.spec.run.exact:
        raise DataError(
            Problem(
                asked=f"go on from {folder} on {counted(world, 'rank')}",
                found=f"it was saved by {manifest.world}",
                why="each rank goes on with its own random streams and its own part of every batch",
                instead=f"--nproc {manifest.world}",
            )
        )


def _check_spec(training: Training, state: PlainState, folder: Path) -> None:
    """The run that was saved is this one, but for how it is watched and kept."""
    try:
        saved = Spec.model_validate_json(json.dumps(state.spec))
    except ValidationError as error:
        why = "it is no Spec as this Fourfold settles one"
        raise DataError(damaged(folder, STATE, f"spec: {_told(error)}", why)) from error
    differing = differences(saved.model_dump(mode="json"), training.spec.model_dump(mode="json"))
    if differing:
        raise DataError([_of_another_run(folder, *difference) for difference in differing])


def _of_another_run(folder: Path, key: str, saved: Any, here: Any) -> Problem:
    return Problem(
        asked=f"go on from {folder} under {key} = {here!r}",
        found=f"it was saved under {key} = {saved!r}",
        why="it is a checkpoint of another run: what went on from it would be neither run",
        instead=f"mv {quote(str(folder))} somewhere else, out of {folder.parent.name}/",
    )


def _check_data(training: Training, manifest: Manifest, folder: Path) -> None:
    """The same data, and the same place in them."""
    here = training.sources.content_hash, training.schedule.position(manifest.step)
    if here != (manifest.data_hash, manifest.position):
        raise DataError(
            Problem(
                asked=f"go on after {manifest.position:,} samples of data with hash {manifest.data_hash}",
                found=f"data with hash {here[0]}, of which {here[1]:,} come before step {manifest.step + 1}",
                why=f"{folder.name} was saved in a run over other data: its samples have other numbers here",
                instead="the files of that time at the Spec's data.path, or another run.dir",
            )
        )


def _check_probe(saved: float, found: float, manifest: Manifest, folder: Path) -> None:
    if found != saved:
        raise CheckFailed(
            Problem(
                asked=f"the loss of step {manifest.step}'s batch as {folder} has it: {saved!r}",
                found=f"{found!r}",
                why="parameters, data or the computation are not what they were when it was saved",
                instead="the code, the data and the number of threads of that run; see its env.json",
            )
        )


def _probe_loss(training: Training, batches: Sequence[Batch]) -> float:
    """Global loss sum of these microbatches under the present parameters, dropout off: nothing is changed by it."""
    float_dtype = training.dtype if training.dtype is torch.float64 else None
    total = torch.zeros(1, dtype=torch.float64, device=training.device)
    each = []
    with observing(training):
        for batch in batches:
            with autocast(training.spec.precision, training.device):
                loss_sum, _ = training.parallel.look(batch.to(training.device, float_dtype))
            each.append(loss_sum.double())
            total += each[-1]
    if training.spec.run.exact:
        return sum_exactly([torch.stack(each).tolist()])[0]
    return float(sum_floats(total if training.parallel.counts else torch.zeros_like(total))[0])
