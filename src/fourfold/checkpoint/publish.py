"""The two ends of a save on disk: a fresh folder that is no checkpoint, and the one rename that makes it one."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import xxhash

from fourfold.checkpoint.manifest import MANIFEST, SAVING, STATE, FileRecord, Manifest, TensorRecord
from fourfold.record.problems import unwritable
from fourfold.record.writer import write_text
from fourfold.spec.errors import DataError, Problem

KEPT = "every earlier checkpoint is untouched"


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """What a manifest tells of the run: steps done, samples passed over, settled layout, hashes of Spec and data."""

    step: int
    position: int
    layout: Mapping[str, Any]
    spec_hash: str
    data_hash: str


def step_name(step: int) -> str:
    """The name of a checkpoint's folder. For people: what counts is the step in its manifest."""
    return f"step-{step:08d}"


def begin(ckpt_dir: Path, step: int) -> Path:
    """Make the folder that a save fills, new and with a name of its own; DataError if the step is saved already."""
    target = ckpt_dir / step_name(step)
    try:
        if os.path.lexists(target):
            raise _exists(target)
        ckpt_dir.mkdir(parents=True, exist_ok=True)
        folder = ckpt_dir / f"{SAVING}{step_name(step)}-{secrets.token_hex(4)}"
        sync_folder(ckpt_dir.parent)
        folder.mkdir()
    except DataError:
        raise
    except OSError as error:
        raise unwritable(target, error, "begin a checkpoint", KEPT) from error
    return folder


def try_out(ckpt_dir: Path) -> None:
    """Find out before a run begins, or goes on, that no checkpoint could be made here: DataError."""
    folder = (
        ckpt_dir / f"{SAVING}trial-{secrets.token_hex(4)}"
    )  # if it is left behind, it is pruned as a dead save is
    try:
        ckpt_dir.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        try:
            (folder / STATE).write_bytes(b"{}")
        finally:
            shutil.rmtree(folder)
    except OSError as error:
        raise unwritable(ckpt_dir, error, "keep checkpoints", KEPT) from error


def publish(
    folder: Path,
    facts: SaveFacts,
    state: str,
    versions: Mapping[str, str],
    world: int,
    files: Mapping[str, FileRecord],
    tensors: Mapping[str, TensorRecord],
) -> Path:
    """Write state and manifest beside the tensors' files, which are on disk, and rename the folder: it is a checkpoint.

    Returns its new path. Everything is flushed to disk before the rename, the rename before the return.
    Raises DataError; the folder is then under its old name.
    """
    target = folder.parent / step_name(facts.step)
    write_text(folder / STATE, state)
    data = state.encode()
    manifest = Manifest(
        step=facts.step,
        position=facts.position,
        world=world,
        layout=dict(facts.layout),
        spec_hash=facts.spec_hash,
        data_hash=facts.data_hash,
        versions=dict(versions),
        created=time.time(),
        files={**files, STATE: FileRecord(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))},
        tensors=dict(tensors),
    )
    write_text(folder / MANIFEST, manifest.model_dump_json() + "\n")  # flushes the folder too
    try:
        if os.path.lexists(target):  # a rename would replace an empty folder without a word
            raise _exists(target)
        os.rename(folder, target)
        try:
            sync_folder(target.parent)
        except OSError:
            with suppress(OSError):  # a save that is said to have failed must not be chosen later
                os.rename(target, folder)
            raise
    except DataError:
        raise
    except OSError as error:
        raise unwritable(target, error, "publish the checkpoint", KEPT) from error
    return target


def discard(folder: Path) -> None:
    """Remove what a failed save has left; what cannot be removed stays, and is no checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exists(target: Path) -> DataError:
    return DataError(
        Problem(
            asked=f"save a checkpoint: {target}",
            found="there is one of that name already",
            why="nothing saved is ever overwritten: another run, or an earlier part of this one, saved this step",
            instead=f"fourfold ckpt inspect {quote(str(target))}  (shows whose it is)",
        )
    )
