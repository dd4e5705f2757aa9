"""Take back what a run wrote after the point from which it goes on."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash
from pydantic import NonNegativeInt

from fourfold.record.problems import unwritable
from fourfold.record.reader import read_lines
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import dumps, write_text
from fourfold.spec.errors import DataError, Problem
from fourfold.spec.value import Value

_BLOCK_BYTES = 2**20


class Mark(Value):
    """A place in a file of lines: how many lines, and bytes, stand before it, and their hash."""

    lines: NonNegativeInt
    bytes: NonNegativeInt
    xxh3_128: str


START = Mark(lines=0, bytes=0, xxh3_128=xxhash.xxh3_128_hexdigest(b""))


class Marker:
    """Marks the end of a file of JSON lines that grows; each byte of it is read once."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._lines = self._bytes = 0
        self._digest = xxhash.xxh3_128()

    def mark(self) -> Mark:
        """The present end; what stands before it is on disk. DataError if it cannot be put there."""
        try:
            with open(self._path, "rb") as file:
                os.fsync(file.fileno())
                return self._read_to(file.fileno(), os.fstat(file.fileno()).st_size)
        except OSError as error:
            kept = "its lines so far are in the file"
            raise unwritable(self._path, error, "flush the record", kept) from error

    def cut_back(self, to: Mark) -> bool:
        """Take back every line after a mark, before any other was made; False if nothing is there any more.

        DataError if it is not the file that was marked, or cannot be cut: it is then as it was.
        """
        try:
            with open(self._path, "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                found = self._read_to(file.fileno(), min(to.bytes, size))
                if size and found != to:
                    raise DataError(_another(self._path, to, found))
                file.truncate(found.bytes)
                os.fsync(file.fileno())
                return found == to
        except FileNotFoundError:
            return False
        except DataError:
            raise
        except OSError as error:
            raise unwritable(self._path, error, "take back later lines", "it is as it was") from error

    def _read_to(self, file: int, size: int) -> Mark:
        while self._bytes < size:
            block = os.pread(file, min(_BLOCK_BYTES, size - self._bytes), self._bytes)
            if not block:
                break
            self._digest.update(block)
            self._lines += block.count(b"\n")
            self._bytes += len(block)
        return Mark(lines=self._lines, bytes=self._bytes, xxh3_128=self._digest.hexdigest())


def set_findings_aside(run: RunDir) -> None:
    """What was checked before a run goes on says nothing of what it becomes: kept, in a folder of its own.

    DataError if it cannot be moved.
    """
    files = sorted(run.findings.glob("*.json"))
    if not files:
        return
    aside = run.findings / f"before-{1 + len(list(run.findings.glob('before-*')))}"
    try:
        aside.mkdir()
        for file in files:
            file.rename(aside / file.name)
    except OSError as error:
        raise unwritable(aside, error, "set earlier findings aside", "they are all there") from error


def keep_lines_until(path: Path | str, step: int) -> None:
    """Rewrite a file of JSON lines without those of a later step than `step`; whole or not at all."""
    if os.path.exists(path):
        kept = [dumps(line) for line in read_lines(path) if line.get("step", 0) <= step]
        write_text(path, "".join(line + "\n" for line in kept))


def _another(path: Path, mark: Mark, found: Mark) -> Problem:
    return Problem(
        asked=f"{path} with the {mark.lines} lines ({mark.bytes:,} bytes) that it had when the checkpoint was saved",
        found=f"{found.lines} others ({found.bytes:,} bytes)",
        why="lines of later steps are taken back before they are written again, and this is not the file they are in",
        instead=f"mv {path} {path}.old  (the run then goes on with a new one)",
    )
