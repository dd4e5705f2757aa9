"""A token file: tokens on disk, mapped into memory, so that a corpus may be larger than it.

Three files with one stem, all little-endian and without any header of their own:

    NAME.bin      the tokens, unsigned integers of 1, 2 or 4 bytes; every document ends with its end mark
    NAME.offsets  int64 [documents + 1]: where each document begins, and the end
    NAME.json     the header (`TokenHeader`), written last: without it the others are not a token file
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from fourfold.data import documents
from fourfold.data.corpus import Corpus, content_hash, pour
from fourfold.spec.errors import DataError, Problem, SpecError
from fourfold.spec.value import Value

# A larger file's content is not hashed at every opening (a second or so of each rank); its size always is compared.
VERIFIED_BYTES = 1 << 30

_PREPARE_AGAIN = "fourfold data prepare INPUT OUTPUT"


class TokenHeader(Value):
    """`NAME.json`: what the token file holds."""

    schema_: Literal["fourfold.tokens/1"] = Field(default="fourfold.tokens/1", alias="schema")
    dtype: Literal["uint8", "uint16", "uint32"]
    tokenizer: str
    tokens: PositiveInt
    documents: PositiveInt
    longest_document: PositiveInt  # tokens, its end mark included
    largest_token: NonNegativeInt
    content_hash: str


def token_paths(path: str | Path) -> tuple[Path, Path, Path]:
    """Tokens, offsets and header of a token file named by its stem or by any of the three."""
    place = Path(os.path.abspath(Path(path).expanduser()))
    stem = place.with_suffix("") if place.suffix in (".bin", ".offsets", ".json") else place
    return tuple(stem.with_name(stem.name + suffix) for suffix in (".bin", ".offsets", ".json"))  # type: ignore[return-value]


def prepare(source: str, output: str, kind: Literal["text", "jsonl"], field: str = "text") -> TokenHeader:
    """Write the documents of `source` as a token file of bytes; memory is bounded by one document of JSON lines.

    A failure leaves nothing behind. Raises SpecError if the output exists, DataError for bad text or a full disk.
    """
    places = token_paths(output)
    if any(place.exists() for place in places):
        raise SpecError(_exists([place for place in places if place.exists()]))
    reading = documents.text(source) if kind == "text" else documents.jsonl(source, field)
    tally = _Tally()
    try:
        places[0].parent.mkdir(parents=True, exist_ok=True)
        with _all_or_none(places) as (tokens, offsets, header_file):
            pour(reading, source, tally.into(tokens), tally.offsets_into(offsets))
            header = tally.header()
            header_file.write((header.model_dump_json(by_alias=True, indent=2) + "\n").encode())
    except DataError:
        raise
    except OSError as error:
        raise DataError(_unwritten(places[0], error)) from error
    return header


def read_header(path: str) -> TokenHeader:
    """The header of a token file. Raises DataError if it is missing or not one."""
    _, _, place = token_paths(path)
    documents.located(str(place), "the header of a token file")
    try:
        return TokenHeader.model_validate_json(place.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(_no_header(place, error)) from error


def open_tokens(path: str, verify_up_to: int = VERIFIED_BYTES) -> Corpus:
    """A token file as a corpus, mapped into memory.

    verify_up_to: bytes of tokens up to which the content is compared with the header; a larger file has a note.
    Raises DataError for a missing or damaged file, naming what disagrees.
    """
    header = read_header(path)
    token_place, offset_place, header_place = token_paths(path)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    tokens = _mapped(token_place, dtype, header.tokens, header_place)
    offsets = _mapped(offset_place, np.dtype("<i8"), header.documents + 1, header_place)
    notes: tuple[str, ...] = ()
    if tokens.nbytes <= verify_up_to:
        _verify(tokens, offsets, header, header_place)
    else:
        notes = (
            f"{token_place} ({tokens.nbytes / 2**30:.1f} GiB) is too large to hash at every start: its content was "
            "not compared with its header; `fourfold data show` compares it",
        )
    return Corpus(
        tokens=tokens,
        offsets=offsets,
        content_hash=header.content_hash,
        largest=header.largest_token,
        reopen=(open_tokens, (str(token_place), 0)),
        notes=notes,
    )


class _Tally:
    """What a header says of tokens that pass by only once."""

    def __init__(self) -> None:
        self._token_hash, self._offset_hash = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._tokens = self._documents = self._longest = self._largest = self._last = 0

    def into(self, file: BinaryIO) -> Callable[[bytes], None]:
        def write(piece: bytes) -> None:
            file.write(piece)
            self._token_hash.update(piece)
            self._tokens += len(piece)
            self._largest = max(self._largest, int(np.frombuffer(piece, np.uint8).max(initial=0)))

        return write

    def offsets_into(self, file: BinaryIO) -> Callable[[bytes], None]:
        def write(offset: bytes) -> None:
            file.write(offset)
            self._offset_hash.update(offset)
            self._longest = max(self._longest, self._tokens - self._last)
            self._documents += self._tokens > self._last
            self._last = self._tokens

        return write

    def header(self) -> TokenHeader:
        return TokenHeader(
            dtype="uint8",
            tokenizer="bytes",
            tokens=self._tokens,
            documents=self._documents,
            longest_document=self._longest,
            largest_token=self._largest,
            content_hash=content_hash(np.dtype(np.uint8), self._token_hash, self._offset_hash),
        )


@contextmanager
def _all_or_none(places: tuple[Path, ...]) -> Iterator[Sequence[BinaryIO]]:
    """Files that get their names, in order, once all are written and on disk; after a failure none is left."""
    drafts = [place.with_name(f"{place.name}.{os.getpid()}.part") for place in places]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(draft.open("xb")) for draft in drafts]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for draft, place in zip(drafts, places, strict=True):
            draft.rename(place)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


def _mapped(place: Path, dtype: np.dtype[Any], count: int, header: Path) -> NDArray[Any]:
    documents.located(str(place), f"what {header.name} describes")
    size = place.stat().st_size
    if size != count * dtype.itemsize:
        raise DataError(
            _disagrees(
                header,
                f"{count} × {dtype.itemsize} = {count * dtype.itemsize} bytes in {place.name}",
                f"{size} bytes",
            )
        )
    try:
        return np.memmap(place, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(_no_header(place, error)) from error


def _verify(tokens: NDArray[Any], offsets: NDArray[np.int64], header: TokenHeader, place: Path) -> None:
    """Compare what the header says with what is there; DataError with everything that differs."""
    lengths = np.diff(offsets)
    sound = offsets[0] == 0 and offsets[-1] == header.tokens and bool((lengths > 0).all())
    found = {
        "largest_token": int(tokens.max()),
        "longest_document": int(lengths.max()),
        "content_hash": content_hash(
            np.dtype(header.dtype), xxhash.xxh3_128(tokens.data), xxhash.xxh3_128(offsets.data)
        ),
    }
    said = header.model_dump()
    problems = [
        _disagrees(place, f"{name} {said[name]}", f"{value}")
        for name, value in found.items()
        if said[name] != value
    ]
    if not sound:
        problems.append(
            _disagrees(place, f"{header.documents} documents of {header.tokens} tokens", "other offsets")
        )
    if problems:
        raise DataError(problems)


def _disagrees(header: Path, said: str, found: str) -> Problem:
    return Problem(
        asked=f"a token file with {said}, as its header says",
        found=found,
        why="the file was cut, damaged or replaced after its header was written",
        instead=_PREPARE_AGAIN,
        where=str(header),
    )


def _no_header(place: Path, error: OSError | ValidationError) -> Problem:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        found = (
            f"{error.error_count()} faults; {'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
        )
    else:
        found = error.strerror or str(error)
    return Problem(
        asked=f"a token file at {place}",
        found=found,
        why="the tokens can be read only as their header describes them",
        instead=_PREPARE_AGAIN,
    )


def _exists(there: Sequence[Path]) -> Problem:
    return Problem(
        asked=f"to write {there[0]}",
        found="it exists",
        why="a run may have been trained on it; it is not overwritten",
        instead=f"another name, or first: rm {shlex.join(map(str, there))}",
    )


def _unwritten(place: Path, error: OSError) -> Problem:
    return Problem(
        asked=f"to write {place}",
        found=error.strerror or str(error),
        why="a token file is written whole or not at all; nothing was left behind",
        instead="an output on a disk with space that this user may write to",
    )
