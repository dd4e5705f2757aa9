"""A corpus in memory: documents of bytes, back to back, each followed by its end mark.

It is opened from the readers of `fourfold.data.documents`, or mapped from a token file (`fourfold.data.tokens`); in
another process it is opened again, and must then be the same text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fourfold.data import documents
from fourfold.data.documents import Documents
from fourfold.spec.errors import DataError, Problem

END_MARK = b"\0"

Write = Callable[[bytes], object]


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Tokens of all documents.

    tokens       unsigned integers [N], little-endian
    offsets      int64 [D + 1]: document d is tokens[offsets[d] : offsets[d + 1]], its end mark included
    content_hash of the documents (`content_hash`); equal for text read directly and its token file
    largest      the largest token
    reopen       the function, with its arguments, that opens the corpus again: this is what is pickled
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    content_hash: str
    largest: int
    reopen: tuple[Callable[..., Corpus], tuple[Any, ...]]
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Callable[..., Corpus], tuple[Any, ...]]:
        return _open_again, (*self.reopen, self.content_hash)


def _open_again(opening: Callable[..., Corpus], arguments: tuple[Any, ...], content_hash: str) -> Corpus:
    corpus = opening(*arguments)
    if corpus.content_hash != content_hash:
        raise DataError(
            Problem(
                asked=f"the text that the run began with (content hash {content_hash})",
                found=f"content hash {corpus.content_hash} on opening {_name(arguments)} again",
                why="the text was changed while it was being read",
                instead="start again once nothing writes to it",
            )
        )
    return corpus


def open_stdlib() -> Corpus:
    """The running Python's standard library: about 11 MB. Raises DataError if there are no sources."""
    return _gather(documents.stdlib(), (open_stdlib, ()))


def open_text(path: str) -> Corpus:
    """UTF-8 text: a file is one document; in a folder each `*.txt` file is one, by path. Raises DataError."""
    path = str(documents.located(path, "text"))
    return _gather(documents.text(path), (open_text, (path,)))


def open_jsonl(path: str, name: str) -> Corpus:
    """JSON lines: the field `name` of each line is one document. Raises DataError, with all bad lines up to 20."""
    path = str(documents.located(path, "JSON lines"))
    return _gather(documents.jsonl(path, name), (open_jsonl, (path, name)))


def pour(source: Documents, name: str, write_tokens: Write, write_offsets: Write) -> None:
    """Write all documents with their end marks, and their offsets as int64, through the two functions.

    name: of the text, for people. Memory is bounded by one piece.
    Raises DataError for bad text, and where there is no text at all.
    """
    offset = count = 0
    write_offsets(struct.pack("<q", offset))
    for pieces in source:
        for piece in pieces:
            write_tokens(piece)
            offset += len(piece)
        write_tokens(END_MARK)
        offset += len(END_MARK)
        count += 1
        write_offsets(struct.pack("<q", offset))
    if offset == count * len(END_MARK):
        raise DataError(documents.no_text(name, count))


def content_hash(dtype: np.dtype[Any], tokens: xxhash.xxh3_128, offsets: xxhash.xxh3_128) -> str:
    """Hash of a corpus from the running hashes of its token bytes and of its offsets (int64, little-endian)."""
    return xxhash.xxh3_128_hexdigest(dtype.name.encode() + tokens.digest() + offsets.digest())


def _name(arguments: tuple[Any, ...]) -> str:
    return str(arguments[0]) if arguments else "the standard library"


def _gather(source: Documents, reopen: tuple[Callable[..., Corpus], tuple[Any, ...]]) -> Corpus:
    token_bytes, offset_bytes = bytearray(), bytearray()
    pour(source, _name(reopen[1]), token_bytes.extend, offset_bytes.extend)
    tokens = np.frombuffer(token_bytes, dtype=np.uint8)
    return Corpus(
        tokens=tokens,
        offsets=np.frombuffer(offset_bytes, dtype="<i8"),
        content_hash=content_hash(tokens.dtype, xxhash.xxh3_128(token_bytes), xxhash.xxh3_128(offset_bytes)),
        largest=int(tokens.max()),
        reopen=reopen,
    )
