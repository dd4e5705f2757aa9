"""One rank's tensors in one safetensors file, hashed while they are written and while they are read: one pass each.

The layout is told in header.py. Wide dtypes come first, so that each tensor begins at a multiple of its element.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from fourfold.checkpoint.header import DTYPES, Stored, read_header
from fourfold.checkpoint.manifest import FileRecord
from fourfold.checkpoint.problems import damaged
from fourfold.checkpoint.publish import KEPT
from fourfold.record.problems import unwritable
from fourfold.spec.boxes import Box
from fourfold.spec.errors import DataError

PIECE_BYTES = 4 * 2**20  # hashed, and written or read, while it is in the processor's cache


class Outgoing(NamedTuple):
    """A tensor to write: dtype as torch names it, and a call that gives the tensor when its turn comes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    resolve: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Of all its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


class Request(NamedTuple):
    """A box of a stored tensor, offset within that tensor, and the tensor of that size to copy it into."""

    box: Box
    into: torch.Tensor


class Wanted(NamedTuple):
    """What is wanted of one stored tensor, which must be of this dtype (as torch names it) and shape."""

    dtype: str
    shape: tuple[int, ...]
    requests: list[Request]


def write_shard(path: Path, outgoing: Sequence[Outgoing]) -> FileRecord:
    """Write a new file and flush it to disk. No tensor may change meanwhile.

    Contiguous tensors on the CPU are written from where they are; others pass through one staging buffer.
    Raises DataError where the file cannot be written.
    """
    outgoing = sorted(outgoing, key=lambda one: -DTYPES[one.dtype][1])
    stage = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    digest, written = xxhash.xxh3_128(), 0
    try:
        with open(path, "xb", buffering=PIECE_BYTES) as file:
            for piece in _file_pieces(outgoing, stage):
                digest.update(piece)
                file.write(piece)
                written += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritable(path, error, "write tensors of a checkpoint", KEPT) from error
    return FileRecord(bytes=written, xxh3_128=digest.hexdigest())


def read_shard(path: Path, record: FileRecord, wanted: Mapping[str, Wanted], *, check: bool) -> None:
    """Copy what is wanted out of a file. With `check` every byte is read and hashed on the way.

    Without it only the rows that are wanted are read: somebody else checks the file.
    Raises DataError for a file that cannot be read, or is not as the manifest tells; what was wanted of it may then
    hold anything.
    """
    try:
        stored = read_header(path)
        with open(path, "rb", buffering=0) as file:
            source = _Source(path, file.fileno(), check)
            if source.size != record.bytes:
                raise _damaged(path, f"{source.size:,} bytes, not {record.bytes:,}")
            absent = sorted(set(wanted) - set(stored))
            if absent:
                raise _damaged(path, f"it does not hold {', '.join(absent)}")
            for key, entry in sorted(stored.items(), key=lambda named: named[1].begin):
                if key in wanted:
                    _deliver(source, key, entry, wanted[key])
            source.go_to(source.size)
    except DataError:
        raise
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    if source.digest is not None and source.digest.hexdigest() != record.xxh3_128:
        raise _damaged(path, f"its hash is {source.digest.hexdigest()}, not {record.xxh3_128}")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _Source:
    """A file read from front to back, hashed on the way if it is to be checked."""

    def __init__(self, path: Path, handle: int, check: bool) -> None:
        self.path = path
        self.size = os.fstat(handle).st_size
        self.digest = xxhash.xxh3_128() if check else None
        self._handle = handle
        self._at = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def fill(self, view: memoryview) -> None:
        """Read as many bytes as `view` has."""
        piece = PIECE_BYTES if self.digest is not None else len(view)
        done = 0
        while done < len(view):
            count = os.preadv(self._handle, [view[done : done + piece]], self._at)
            if count == 0:
                raise _damaged(self.path, "it ends early")
            if self.digest is not None:
                self.digest.update(view[done : done + count])
            done += count
            self._at += count

    def go_to(self, place: int) -> None:
        """Go on to a byte further on; what lies between is read only to be hashed."""
        assert place >= self._at, "a file is read from front to back"
        while self.digest is not None and self._at < place:
            self.fill(bytes_of(self.scratch(min(place - self._at, PIECE_BYTES))))
        self._at = place

    def scratch(self, count: int) -> torch.Tensor:
        """Memory used again and again."""
        if len(self._scratch) < count:
            self._scratch = torch.empty(max(count, PIECE_BYTES), dtype=torch.uint8)
        return self._scratch[:count]


def _deliver(source: _Source, key: str, stored: Stored, want: Wanted) -> None:
    """Read one stored tensor, or the rows of it that are wanted, into place."""
    if (stored.dtype, stored.shape) != (DTYPES[want.dtype][0], want.shape):
        raise _damaged(source.path, f"{key} is {stored.dtype} {stored.shape}, not {want.dtype} {want.shape}")
    source.go_to(stored.begin)
    if len(want.requests) == 1:
        box, into = want.requests[0]
        if box.size == want.shape and into.device.type == "cpu" and into.is_contiguous():
            source.fill(bytes_of(into))
            return
    first, last = 0, want.shape[0] if want.shape else 1
    row_bytes = (stored.end - stored.begin) // last
    if source.digest is None and want.shape:
        first = min(box.offset[0] for box, _ in want.requests)
        last = max(box.offset[0] + box.size[0] for box, _ in want.requests)
    source.go_to(stored.begin + first * row_bytes)
    part = source.scratch((last - first) * row_bytes)
    source.fill(bytes_of(part))
    held = part.view(getattr(torch, want.dtype)).view((last - first, *want.shape[1:]) if want.shape else ())
    for box, into in want.requests:
        within = list(box.slices)
        if within:
            within[0] = slice(within[0].start - first, within[0].stop - first)
        into.copy_(held[tuple(within)])


def _file_pieces(outgoing: Sequence[Outgoing], stage: torch.Tensor) -> Iterator[memoryview]:
    """The whole file, in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in outgoing:
        assert one.key not in header, f"{one.key} twice in a file"
        offsets = [at, at + one.bytes]
        header[one.key] = {"dtype": DTYPES[one.dtype][0], "shape": one.shape, "data_offsets": offsets}
        at += one.bytes
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for one in outgoing:
        tensor = one.resolve().detach().resolve_conj().resolve_neg()
        assert tensor.shape == one.shape, f"{one.key} is {tuple(tensor.shape)}, planned as {one.shape}"
        yield from _pieces(tensor, stage)


def _pieces(tensor: torch.Tensor, stage: torch.Tensor) -> Iterator[memoryview]:
    """The elements in logical order; a piece must be used before the next is asked for."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        data = bytes_of(tensor)
        for at in range(0, len(data), PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]
    elif tensor.nbytes <= len(stage):
        part = stage[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        part.copy_(tensor)
        yield bytes_of(part)
    else:
        rows = len(stage) // (tensor.nbytes // len(tensor))
        for part in torch.split(tensor, rows) if rows else torch.unbind(tensor):
            yield from _pieces(part, stage)


def _damaged(path: Path, found: str) -> DataError:
    return DataError(damaged(path.parent, path.name, found, "it is not as it was saved"))
