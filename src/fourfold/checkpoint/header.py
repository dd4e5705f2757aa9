"""What a safetensors file says it holds, read by hand: no tensor is loaded, nothing is executed.

Layout: 8 bytes, little-endian: the length of the header; the header, a JSON object of
name -> {"dtype", "shape", "data_offsets": [begin, end]}; then the tensors' bytes, without a gap.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.checkpoint.problems import damaged
from fourfold.spec.errors import DataError

HEADER_LIMIT_BYTES = 100_000_000  # as in safetensors itself

# torch's name -> (the name in the file, bytes per element)
DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_BYTES = dict(DTYPES.values())


class Stored(NamedTuple):
    """A tensor in a file: dtype as the file names it ("F32"), shape, and which bytes of the file are its own."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path | str) -> dict[str, Stored]:
    """The tensors of a safetensors file by key, whose bytes fill the file exactly; DataError for any other file."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            held = os.fstat(file.fileno()).st_size - 8 - length
            if held < 0 or length > HEADER_LIMIT_BYTES:
                raise _damaged(path, f"its first 8 bytes tell of a header of {length:,} bytes")
            return _entries(path, json.loads(file.read(length)), 8 + length, held)
    except DataError:
        raise
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON: {error}") from error


def _entries(path: Path, header: Any, start: int, held: int) -> dict[str, Stored]:
    """start: where the tensors' bytes begin, `held` of them."""
    if not isinstance(header, dict):
        raise _damaged(path, f"its header is {type(header).__name__}, not an object")
    found = {key: _entry(path, key, entry, start) for key, entry in header.items() if key != "__metadata__"}
    at = start
    for begin, end in sorted((stored.begin, stored.end) for stored in found.values()):
        if begin != at:
            raise _damaged(path, f"byte {min(begin, at)} belongs to no tensor, or to two")
        at = end
    if at != start + held:
        raise _damaged(path, f"{held:,} bytes of tensors, {at - start:,} told of in its header")
    return found


def _entry(path: Path, key: str, entry: Any, start: int) -> Stored:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            dtype in _BYTES and all(type(length) is int and length >= 0 for length in shape) and begin >= 0
        ):
            if end - begin == math.prod(shape) * _BYTES[dtype]:
                return Stored(dtype, tuple(shape), start + begin, start + end)
    raise _damaged(path, f"its header does not describe {key!r} as a tensor: {str(entry)[:80]}")


def _damaged(path: Path, found: str) -> DataError:
    why = "it is no whole safetensors file"
    return DataError(damaged(path.parent, f"the tensors of {path.name}", found, why))
