"""What lies in a ckpt folder, one entry for each folder, as manifests and sizes tell it: no tensor's bytes are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fourfold.checkpoint.choose import Saved, look, reason
from fourfold.checkpoint.hold import in_use
from fourfold.checkpoint.manifest import Manifest
from fourfold.checkpoint.validate import read_manifest, validate
from fourfold.spec.errors import DataError
from fourfold.spec.value import Value

LIST_SCHEMA = "fourfold.ckpt.list/1"
SET_ASIDE = ".aside-"  # what stood in the way of a run that went on: kept, and never gone on from

State = Literal["valid", "damaged", "saving", "unfinished", "set aside"]


class Entry(Value):
    """One folder. step, position (samples), created (unix seconds): None where no manifest tells them.

    bytes: of its files, as the manifest has them, or as they lie there. valid: by its manifest and by every file's
    size and header. why: what is wrong with it, or what it is, in one line.
    """

    path: str
    state: State
    step: int | None
    position: int | None
    created: float | None
    bytes: int
    why: str = ""


class Listing(Value):
    """Every folder: checkpoints, the newest first, then damaged ones of no known step, saves, what was set aside."""

    ckpt_dir: str
    newest_valid: str | None
    entries: tuple[Entry, ...] = Field(strict=False)

    def of(self, state: State) -> tuple[Entry, ...]:
        """The entries of one state."""
        return tuple(entry for entry in self.entries if entry.state == state)

    def document(self) -> dict[str, Any]:
        """The JSON document of `fourfold ckpt inspect` on a run: totals, then the entries."""
        return {
            "schema": LIST_SCHEMA,
            "ckpt_dir": self.ckpt_dir,
            "newest_valid": self.newest_valid,
            "valid": len(self.of("valid")),
            "bytes": sum(entry.bytes for entry in self.entries),
            "checkpoints": [entry.model_dump(mode="json") for entry in self.entries],
        }


def list_checkpoints(ckpt_dir: Path | str) -> Listing:
    """List a ckpt folder; one that does not exist holds nothing. DataError if it cannot be listed."""
    ckpt_dir = Path(ckpt_dir)
    shelf = look(ckpt_dir)
    entries = [_of_saved(saved) for saved in shelf.saved]
    newest = next((entry.path for entry in entries if entry.state == "valid"), None)
    entries += [_plain(path, "damaged", why) for path, why in shelf.unreadable]
    entries += [_of_save(path) for path in shelf.saving]
    entries += [_plain(path, "unfinished", "a removal that was not finished") for path in shelf.removing]
    entries += [_aside(path) for path in sorted(ckpt_dir.glob(f"{SET_ASIDE}*"), reverse=True)]
    return Listing(ckpt_dir=str(ckpt_dir), newest_valid=newest, entries=tuple(entries))


def _of_saved(saved: Saved) -> Entry:
    problems = validate(saved.path, hashes=False)
    return _told(saved.path, saved.manifest, "damaged" if problems else "valid", _why(problems))


def _of_save(path: Path) -> Entry:
    if in_use(path):
        return _plain(path, "saving", "a save is at work in it")
    return _plain(path, "unfinished", "a save that was not finished")


def _aside(path: Path) -> Entry:
    try:
        manifest = read_manifest(path)
    except DataError as error:
        return _plain(path, "set aside", _why(error.problems))
    return _told(path, manifest, "set aside", _why(validate(path, hashes=False)) or "not this run's any more")


def _why(problems: Sequence[Any]) -> str:
    return reason(problems) if problems else ""


def _told(path: Path, manifest: Manifest, state: State, why: str) -> Entry:
    return Entry(
        path=str(path),
        state=state,
        step=manifest.step,
        position=manifest.position,
        created=manifest.created,
        bytes=manifest.total_bytes,
        why=why,
    )


def _plain(path: Path, state: State, why: str) -> Entry:
    size = 0 if path.is_symlink() else sum(_sizes(path))
    return Entry(path=str(path), state=state, step=None, position=None, created=None, bytes=size, why=why)


def _sizes(path: Path) -> Iterator[int]:
    """Of all files in a folder; what vanishes meanwhile is left out."""
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):
                yield os.lstat(os.path.join(folder, file)).st_size
