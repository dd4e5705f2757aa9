"""Whether a manifest's tensors are whole: chunks that cover each shape once, and lie where they are said to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from fourfold.checkpoint.header import DTYPES, Stored, read_header
from fourfold.checkpoint.manifest import Manifest, TensorRecord
from fourfold.checkpoint.problems import damaged
from fourfold.spec.boxes import Box, intersect
from fourfold.spec.errors import DataError, Problem


def coverage_problems(manifest: Manifest, folder: Path) -> list[Problem]:
    """A problem for each tensor whose chunks leave an element out, hold one twice, or reach beyond the shape."""
    found = {name: _uncovered(tensor) for name, tensor in manifest.tensors.items()}
    return [
        damaged(folder, f"tensor {name}", said, "its chunks must cover it exactly once")
        for name, said in found.items()
        if said
    ]


def stored_problems(manifest: Manifest, folder: Path, sound: Collection[str]) -> list[Problem]:
    """Chunks that are not in their file as told, and stored tensors that no chunk names, or two.

    sound: the files to look into; of one that is known to be damaged no more is said.
    """
    problems: list[Problem] = []
    headers: dict[str, dict[str, Stored]] = {}
    for name in _tensor_files(manifest):
        if name in sound:
            try:
                headers[name] = read_header(folder / name)
            except DataError as error:
                problems += error.problems
    named: Counter[tuple[str, str]] = Counter()
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            named[chunk.file, chunk.key] += 1
            said = _misplaced(manifest, tensor.dtype, chunk.size, headers, chunk.file, chunk.key)
            if said:
                problems.append(damaged(folder, f"tensor {name}", said, "a chunk must lie where it is told"))
    for file, header in headers.items():
        for key in header:
            if named[file, key] != 1:
                found = "named by two chunks" if named[file, key] else "in the file, but of no tensor"
                problems.append(damaged(folder, f"{key} in {file}", found, "each belongs to one chunk"))
    return problems


def _tensor_files(manifest: Manifest) -> list[str]:
    return [name for name in manifest.files if name.endswith(".safetensors")]


def _misplaced(
    manifest: Manifest,
    dtype: str,
    size: Sequence[int],
    headers: dict[str, dict[str, Stored]],
    file: str,
    key: str,
) -> str:
    """What is wrong with where a chunk lies; "" if nothing is, or its file is known to be damaged."""
    if dtype not in DTYPES:
        return f"an unknown dtype, {dtype}"
    if file not in manifest.files or not file.endswith(".safetensors"):
        return f"a chunk in {file}, which is no safetensors file of this checkpoint"
    if file not in headers:
        return ""
    stored = headers[file].get(key)
    if stored is None:
        return f"{file} has no {key}"
    wanted = DTYPES[dtype][0], tuple(size)
    if (stored.dtype, stored.shape) != wanted:
        return f"{key} in {file} is {stored.dtype} {stored.shape}, not {wanted[0]} {wanted[1]}"
    return ""


def _uncovered(tensor: TensorRecord) -> str:
    """What is wrong with the boxes of a tensor's chunks; "" if they cover it exactly once."""
    boxes = [Box(chunk.offset, chunk.size) for chunk in tensor.chunks]
    for box in boxes:
        if not len(box.offset) == len(box.size) == len(tensor.shape):
            return f"a chunk of {len(box.size)} dims, of a tensor of shape {tensor.shape}"
        ends = (start + length for start, length in zip(box.offset, box.size, strict=True))
        if any(end > length for end, length in zip(ends, tensor.shape, strict=True)):
            return f"a chunk at {box.offset} of size {box.size}, beyond shape {tensor.shape}"
    boxes = [box for box in boxes if box.elements]
    twice = _overlap(boxes, len(tensor.shape))
    if twice:
        return f"elements held twice, from {twice.offset}, size {twice.size}"
    covered, wanted = sum(box.elements for box in boxes), math.prod(tensor.shape)
    return f"{covered:,} of its {wanted:,} elements" if covered != wanted else ""


def _overlap(boxes: list[Box], dims: int) -> Box | None:
    """Where two of the boxes meet. A sweep along the dim that is cut most: a grid of n × n boxes costs n³, not n⁴."""
    if dims == 0:
        return boxes[1] if len(boxes) > 1 else None
    dim = max(range(dims), key=lambda one: len({box.offset[one] for box in boxes}))
    near: list[Box] = []
    for box in sorted(boxes, key=lambda one: one.offset[dim]):
        near = [other for other in near if other.offset[dim] + other.size[dim] > box.offset[dim]]
        for other in near:
            both = intersect(box, other)
            if both:
                return both
        near.append(box)
    return None
