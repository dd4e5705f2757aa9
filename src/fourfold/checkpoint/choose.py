"""Which checkpoint to go on from: the newest whole one, by what its manifest says and never by a name or a pointer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fourfold.checkpoint.manifest import REMOVING, SAVING, Manifest
from fourfold.checkpoint.validate import read_manifest, validate
from fourfold.record.problems import unreadable
from fourfold.spec.errors import DataError, Problem


class PassedOver(NamedTuple):
    """A folder that was not taken, and why, in one line."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The newest valid checkpoint and its step (None: there is none), and what was not taken in its place."""

    path: Path | None
    step: int | None
    passed_over: tuple[PassedOver, ...]


class Saved(NamedTuple):
    """A folder with a readable manifest; its files may still be damaged."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Shelf:
    """What lies in a ckpt folder: checkpoints (newest first, by step), leftovers of saves and of removals, the rest."""

    saved: tuple[Saved, ...]
    saving: tuple[Path, ...]
    removing: tuple[Path, ...]
    unreadable: tuple[PassedOver, ...]


def newest_valid(ckpt_dir: Path | str) -> Choice:
    """The checkpoint of the highest step whose every byte is right.

    Each candidate is checked without its hashes first, then with them. A folder that does not exist holds none;
    one that cannot be listed is a DataError.
    """
    return newest_of(look(ckpt_dir))


def newest_of(shelf: Shelf) -> Choice:
    """The same for a folder that was listed already: what was saved there since is not looked at."""
    passed = [*shelf.unreadable]
    passed += [PassedOver(path, "a save that was not finished") for path in shelf.saving]
    passed += [PassedOver(path, "a removal that was not finished") for path in shelf.removing]
    for saved in shelf.saved:
        problems = validate(saved.path, hashes=False) or validate(saved.path)
        if not problems:
            return Choice(saved.path, saved.manifest.step, tuple(passed))
        passed.append(PassedOver(saved.path, reason(problems)))
    return Choice(None, None, tuple(passed))


def look(ckpt_dir: Path | str) -> Shelf:
    """List a ckpt folder; files in it are not looked at. DataError if it is there and cannot be listed."""
    ckpt_dir = Path(ckpt_dir)
    try:
        folders = sorted(child for child in ckpt_dir.iterdir() if child.is_dir())
    except FileNotFoundError:
        folders = []
    except OSError as error:
        raise unreadable(ckpt_dir, error.strerror or str(error)) from error
    saved, rest = [], []
    for folder in folders:
        if folder.name.startswith("."):
            continue
        if os.path.islink(folder):
            rest.append(PassedOver(folder, "a link: what it points at can change"))
            continue
        try:
            saved.append(Saved(folder, read_manifest(folder)))
        except DataError as error:
            rest.append(PassedOver(folder, reason(error.problems)))
    saved.sort(key=lambda one: (one.manifest.step, one.manifest.created), reverse=True)
    return Shelf(
        saved=tuple(saved),
        saving=tuple(folder for folder in folders if folder.name.startswith(SAVING)),
        removing=tuple(folder for folder in folders if folder.name.startswith(REMOVING)),
        unreadable=tuple(rest),
    )


def reason(problems: Sequence[Problem]) -> str:
    """The first of some problems in one line, and how many more there are."""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{problems[0].asked}: {problems[0].found}{more}"
