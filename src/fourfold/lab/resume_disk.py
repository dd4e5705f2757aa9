"""The resume exercise on disk, without ranks: runs as a kill leaves them, a bit that flips, a mark that is trusted."""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from safetensors import SafetensorError

from fourfold.checkpoint.choose import Choice
from fourfold.checkpoint.header import read_header
from fourfold.checkpoint.publish import step_name
from fourfold.checkpoint.validate import read_manifest
from fourfold.lab.resume_ranks import MARK, read_unchecked
from fourfold.record.reader import RunReader
from fourfold.record.run_dir import RunDir, claim


class Row(NamedTuple):
    """A step (from 1), done twice."""

    step: int
    undisturbed: float  # loss
    resumed: float
    same_update: bool  # gradient norm and learning rate, to the last bit
    same_samples: bool  # on every rank, in the same order

    @property
    def difference(self) -> float:
        return abs(self.undisturbed - self.resumed)

    @property
    def same(self) -> bool:
        """All of it, to the last bit."""
        return self.undisturbed == self.resumed and self.same_update and self.same_samples


class Flip(NamedTuple):
    """A bit that flipped, of so many in the file, and what it made of the number it belongs to."""

    file: Path
    bits: int
    before: float
    after: float


def interrupted(run: RunDir, to: Path, after: int, checkpoints: Iterable[int]) -> RunDir:
    """A copy of the run as a kill right after step `after` leaves it, with its checkpoints of these steps."""
    copied = claim(to)
    for file in (run.spec_toml, run.spec_json, run.plan_json, run.metrics):
        shutil.copy(file, copied.path)
    shutil.copytree(run.events_dir, copied.events_dir)
    for path in (copied.metrics, *copied.events_dir.iterdir()):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text(
            "".join(line for line in lines if json.loads(line)["step"] <= after), encoding="utf-8"
        )
    for step in checkpoints:
        shutil.copytree(saved(run, step), saved(copied, step))
    return copied


def saved(run: RunDir, step: int) -> Path:
    """The run's checkpoint of a step."""
    return run.checkpoints / step_name(step)


def bits_of(folder: Path) -> dict[str, bytes]:
    """The bytes of all that a checkpoint's shards hold, by its key there: a tensor's name, where it is not cut."""
    return {
        key: (folder / file).read_bytes()[stored.begin : stored.end]
        for file in read_manifest(folder).files
        if file.endswith(".safetensors")
        for key, stored in read_header(folder / file).items()
    }


def compared(run: RunDir, other: RunDir, after: int) -> list[Row]:
    """The steps after `after` of two runs, from their own records."""
    losses, losses_other = _losses(run), _losses(other)
    ids, ids_other = sample_ids(run), sample_ids(other)
    return [
        Row(
            step=step,
            undisturbed=line["loss"],
            resumed=losses_other[step]["loss"],
            same_update=all(line[key] == losses_other[step][key] for key in ("grad_norm", "lr")),
            same_samples=ids[step] == ids_other[step],
        )
        for step, line in losses.items()
        if step > after
    ]


def sample_ids(run: RunDir) -> dict[int, list[list[int]]]:
    """By step, what each rank was given."""
    reader = RunReader(run.path)
    ranks = [  # a step that was done again counts as it was done last
        {event["step"]: event["sample_ids"] for event in reader.events(rank) if event["kind"] == "step"}
        for rank in reader.ranks()
    ]
    return {step: [rank[step] for rank in ranks] for step in ranks[0]}


def flip_bit(folder: Path, tensor: str, bit: int) -> Flip:
    """Flip one bit of the first element of a checkpoint's float32 tensor."""
    chunk = read_manifest(folder).tensors[tensor].chunks[0]
    file = folder / chunk.file
    data = bytearray(file.read_bytes())
    at = read_header(file)[chunk.key].begin
    (before,) = struct.unpack_from("<f", data, at)
    data[at + bit // 8] ^= 1 << bit % 8
    (after,) = struct.unpack_from("<f", data, at)
    file.write_bytes(data)
    return Flip(file, len(data) * 8, before, after)


def streams_in(names: Iterable[str]) -> dict[str, int]:
    """How many random streams of each rank are among these tensors."""
    return dict(sorted(Counter(name.partition(".")[0] for name in names if name.startswith("rank")).items()))


def hash_of(file: Path) -> str:
    """xxh3-128 of its bytes."""
    return str(xxhash.xxh3_128_hexdigest(file.read_bytes()))


def tensors_there(run: RunDir, step: int, whole: Path) -> str:
    """How many of the whole checkpoint's tensors the run's own has."""
    there, wanted = (len(read_manifest(folder).tensors) for folder in (saved(run, step), whole))
    return f"{there} of {wanted} tensors"


def cut_off(folder: Path, whole: Path) -> str:
    """How much of each of a checkpoint's shards is there."""
    return ", ".join(
        f"{file.name} has {file.stat().st_size:,} of {(whole / file.name).stat().st_size:,} bytes"
        for file in sorted(folder.iterdir())
    )


def read_where_the_mark_points(ckpt_dir: Path) -> str:
    """What a reader gets that trusts the mark: how it fails, in one line; "" if it does not."""
    try:
        read_unchecked(ckpt_dir / (ckpt_dir / MARK).read_text())
    except SafetensorError as error:
        return str(error)
    return ""


def said(choice: Choice) -> list[str]:
    """What was passed over and why, and what is gone on from, as `fourfold train --resume` tells it."""
    lines = [f"passed over {path.name}: {reason}" for path, reason in choice.passed_over]
    return [*lines, f"goes on from {choice.path.name}" if choice.path else "nothing to go on from"]


def _losses(run: RunDir) -> Mapping[int, dict[str, Any]]:
    return {line["step"]: line for line in RunReader(run.path).metrics() if "loss" in line}
