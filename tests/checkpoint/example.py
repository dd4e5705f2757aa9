"""A small checkpoint of two ranks, written by hand: by numpy and the safetensors package, not by the product."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import save_file

from fourfold.checkpoint.manifest import MANIFEST, STATE, Chunk, FileRecord, Manifest, TensorRecord, seal

FILES = ("rank00000.safetensors", "rank00001.safetensors")


def write_checkpoint(ckpt_dir: Path, step: int = 10, name: str = "", created: float | None = None) -> Path:
    """A whole checkpoint of `step`; its values depend on the step, its files' sizes do not."""
    folder = ckpt_dir / (name or f"step-{step:08d}")
    folder.mkdir(parents=True)
    tensors = {}
    held: list[dict[str, Any]] = [{}, {}]
    weight = np.arange(15, dtype=np.float32).reshape(5, 3) + step
    table = np.arange(16, dtype=np.int64).reshape(4, 4) + step
    tensors["model.weight"] = _cut(held, "model.weight", weight, [((0, 0), (3, 3)), ((3, 0), (2, 3))])
    quarters = [((row, column), (2, 2)) for row in (0, 2) for column in (0, 2)]
    tensors["model.table"] = _cut(held, "model.table", table, quarters)
    tensors["optimizer.step"] = _cut(held, "optimizer.step", np.array(step, np.int64), [((), ())])
    tensors["model.none"] = _cut(held, "model.none", np.zeros((0, 3), np.float32), [((0, 0), (0, 3))])
    for file, arrays in zip(FILES, held, strict=True):
        save_file(arrays, folder / file, {"format": "pt"})
    (folder / STATE).write_text(json.dumps({"step": f"{step:08d}"}))
    manifest = Manifest(
        step=step,
        position=step * 16,
        world=2,
        layout={"dp_replicate": 2, "sp": False},
        spec_hash="0" * 32,
        data_hash="1" * 32,
        versions={"fourfold": "0.1.0", "torch": "2.13.0", "python": "3.11.8"},
        created=1.8e9 + step if created is None else created,
        files={name: record(folder / name) for name in (*FILES, STATE)},
        tensors=tensors,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2))
    return folder


def record(path: Path) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def forge(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest on purpose: the files as they now are and a new seal, so that only `edit` is wrong."""
    body = json.loads((folder / MANIFEST).read_text())
    for name in body["files"]:
        body["files"][name] = record(folder / name).model_dump(mode="json")
    edit(body)
    body.pop("seal", None)
    (folder / MANIFEST).write_text(json.dumps({**body, "seal": seal(body)}))


def flip(path: Path, bit: int) -> None:
    """Flip one bit in place; a second time, and it is as before."""
    with open(path, "r+b", buffering=0) as file:
        [byte] = os.pread(file.fileno(), 1, bit // 8)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


def truncate(path: Path, by: int = 1) -> None:
    os.truncate(path, path.stat().st_size - by)


def leave_unfinished(ckpt_dir: Path, step: int, age_s: float = 0.0) -> Path:
    """What a killed save leaves, last changed so long ago."""
    folder = ckpt_dir / f".saving-step-{step:08d}-abcd"
    folder.mkdir(parents=True)
    file = folder / FILES[0]
    file.write_bytes(b"half a file")
    for path in (file, folder):
        stamp = path.stat().st_mtime - age_s
        os.utime(path, (stamp, stamp))
    return folder


def _cut(
    held: list[dict[str, Any]], name: str, whole: Any, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> TensorRecord:
    """Boxes of an array, dealt to the files in turn."""
    chunks = []
    for number, (offset, size) in enumerate(boxes):
        rank, key = number % 2, f"{name}:{number}"
        part = whole[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]
        held[rank][key] = np.ascontiguousarray(part).reshape(size)
        chunks.append(Chunk(file=FILES[rank], key=key, offset=offset, size=size))
    return TensorRecord(dtype=str(whole.dtype), shape=whole.shape, chunks=tuple(chunks))
