"""What a checkpoint holds, as its manifest tells it: no tensor is read. And which checkpoint a path means."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold.checkpoint.choose import look
from fourfold.checkpoint.header import DTYPES
from fourfold.checkpoint.manifest import MANIFEST, SCHEMA, TensorRecord
from fourfold.checkpoint.validate import read_manifest
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import DataError, Problem, SpecError

INSPECT_SCHEMA = "fourfold.ckpt.inspect/1"


def describe(folder: Path | str) -> dict[str, Any]:
    """The document of `fourfold ckpt inspect`: the manifest's facts, totals, its files, a line for each tensor.

    `by_kind` has tensors and bytes by the first part of their names: model, optimizer, the ranks' random streams.
    Raises DataError if the manifest is not whole. Whether the files are is for `validate` to say.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    body = manifest.model_dump(mode="json")
    rows = [_row(name, tensor) for name, tensor in manifest.tensors.items()]
    facts = ("step", "position", "world", "layout", "spec_hash", "data_hash", "versions", "created")
    return {
        "schema": INSPECT_SCHEMA,
        "path": str(folder),
        "format": SCHEMA,
        **{fact: body[fact] for fact in facts},
        "bytes": manifest.total_bytes,
        "by_kind": _by_kind(rows),
        "files": body["files"],
        "tensors": rows,
    }


def ckpt_dir_of(path: Path | str) -> Path:
    """The ckpt folder of a run directory; any other folder is taken for a ckpt folder itself.

    Raises DataError for what is no folder, SpecError for a checkpoint.
    """
    run = RunDir(Path(path))
    if not run.path.is_dir():
        found = "a file, not a folder" if run.path.exists() else "nothing has that name"
        raise DataError(_none(run.path, found))
    if (run.path / MANIFEST).exists():
        why = "a checkpoint stands among others in a ckpt folder"
        parent = str(run.path.absolute().parent)
        raise SpecError(Problem(f"the ckpt folder {path}", "a single checkpoint", why, parent))
    return run.checkpoints if run.is_run or run.checkpoints.is_dir() else run.path


def checkpoints_at(path: Path | str) -> tuple[Path, ...]:
    """The checkpoints a path means: itself, or, of a run directory or a ckpt folder, the newest by its manifest's step.

    Behind the newest come the folders whose step cannot be told, since their manifest cannot be read. Raises DataError
    if there is nothing to look at.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        return (path,)
    place = ckpt_dir_of(path)
    shelf = look(place)
    untold = tuple(folder.path for folder in shelf.unreadable if not folder.path.is_symlink())
    if shelf.saved or untold:
        return (*(saved.path for saved in shelf.saved[:1]), *untold)
    if shelf.saving or place != path or RunDir(path).is_run:
        begun = f"; unfinished saves: {len(shelf.saving)}" if shelf.saving else ""
        raise DataError(_none(path, f"no checkpoint was saved in it{begun}"))
    return (path,)


def _none(path: Path, found: str) -> Problem:
    return Problem(
        asked=f"the checkpoint {path}",
        found=found,
        why=f"a checkpoint is a folder with a {MANIFEST}; a run keeps its own in ckpt/",
        instead="fourfold train tiny --nproc 2 --set checkpoint.every=10  (makes some under runs/)",
    )


def _by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int | None]]:
    """Tensors, and bytes of them; None where a dtype is unknown here."""
    kinds: dict[str, list[int | None]] = {}
    for row in rows:
        kind = row["name"].partition(".")[0]
        kinds.setdefault("random streams" if re.fullmatch(r"rank\d+", kind) else kind, []).append(
            row["bytes"]
        )
    return {
        kind: {"tensors": len(sizes), "bytes": None if None in sizes else sum(size or 0 for size in sizes)}
        for kind, sizes in kinds.items()
    }


def _row(name: str, tensor: TensorRecord) -> dict[str, Any]:
    elements = math.prod(tensor.shape)
    known = DTYPES.get(tensor.dtype)
    return {
        "name": name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "elements": elements,
        "bytes": elements * known[1] if known else None,
        "chunks": len(tensor.chunks),
    }
