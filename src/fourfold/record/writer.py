"""The one writer of a run directory: whole lines, whole files, and never less than was there before."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel

from fourfold.record.aloud import folded, say
from fourfold.record.problems import is_full, unwritable
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import DataError
from fourfold.spec.spec import Spec

SPEC_SCHEMA = "fourfold.spec/1"


class JsonLines:
    """An append-only file of JSON lines.

    A line is one write to the operating system, so nothing waits in a buffer of ours when the process dies.
    A line that could be written only in part is taken back: the file holds whole lines.
    """

    def __init__(self, path: Path | str, hold_bytes: int = 0) -> None:
        """Open or make the file and its folder; mend or cut off a last line broken by an earlier death.

        hold_bytes: lines for which the disk has no room are kept in memory up to so many bytes, told once, and written
        before any later one.
        """
        self.path = Path(path)
        self.lines = 0  # written by this object
        self._hold_bytes = hold_bytes
        self._held: list[bytes] = []
        try:
            self.path.parent.mkdir(exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _mend_tail(self._file)
        except OSError as error:
            kept = "what it held before, if anything, is untouched"
            raise unwritable(self.path, error, "open the record", kept) from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; DataError (disk full, no permission) leaves every earlier line whole."""
        self._held.append((dumps(line) + "\n").encode())
        try:
            self._write_held()
        except DataError as error:
            if not is_full(error.__cause__) or sum(map(len, self._held)) > self._hold_bytes:
                self._held.pop()
                raise
            if len(self._held) == 1:
                most = f"{self._hold_bytes / 2**20:g} MiB"
                say(
                    folded(
                        f"note: no room for {self.path}: its lines are kept in memory, up to {most}, until there is"
                    )
                )

    def _write_held(self) -> None:
        while self._held:
            self._append(self._held[0])
            del self._held[0]

    def _append(self, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):  # one turn, unless the disk fills up inside the line
                done += os.write(self._file, data[done:])
        except OSError as error:
            with suppress(OSError):
                if done:
                    os.ftruncate(self._file, os.fstat(self._file).st_size - done)
            kept = f"every line before this one ({self.lines} of this process) is whole in the file"
            raise unwritable(self.path, error, f"write line {self.lines + 1}", kept) from error
        self.lines += 1

    def flush(self) -> None:
        """Put every line so far on disk, for a power cut to spare. DataError if one of them is not even in the file."""
        self._write_held()
        try:
            os.fsync(self._file)
            _flush_folder(self.path.parent)
        except OSError as error:
            kept = "its lines so far are in the file"
            raise unwritable(self.path, error, "flush the record", kept) from error

    def close(self) -> None:
        """Close the file; some file systems report a full disk only here."""
        try:
            try:
                self._write_held()
            finally:
                os.close(self._file)
        except DataError:
            raise
        except OSError as error:
            kept = f"of {self.lines} lines the last ones may be missing"
            raise unwritable(self.path, error, "close the record", kept) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_json(path: Path | str, value: Any) -> None:
    """Write one JSON document, whole or not at all; what was there before stays until it is."""
    write_text(path, dumps(value, indent=2) + "\n")


def write_text(path: Path | str, text: str) -> None:
    """Write one file, whole or not at all: a new file beside it, flushed to disk, then renamed over it."""
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(new, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        _flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        kept = (
            "the earlier file of that name is untouched"
            if os.path.exists(path)
            else "there was no earlier file"
        )
        raise unwritable(path, error, "write the file", kept) from error


def write_request(run: RunDir, spec: Spec, provenance: Mapping[str, str], text: str) -> None:
    """Write `spec.toml` (the text as given) and `spec.json` (resolved, with where each setting came from)."""
    write_text(run.spec_toml, text)
    write_json(run.spec_json, {"schema": SPEC_SCHEMA, "spec": spec, "provenance": provenance})


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON, one line unless indented; a float that is not finite becomes "nan", "inf" or "-inf"."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False, default=_plain)


def _mend_tail(file: int) -> None:
    """End the file with a whole line: keep a last line that lost only its newline, cut off a broken one."""
    size = os.fstat(file).st_size
    start, tail = size, b""
    while start and b"\n" not in tail:
        begin = max(0, start - 65536)
        tail = os.pread(file, start - begin, begin) + tail
        start = begin
    last = tail[tail.rfind(b"\n") + 1 :]
    if not last:
        return
    try:
        json.loads(last)
    except ValueError:
        os.ftruncate(file, size - len(last))
    else:
        os.write(file, b"\n")


def _flush_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form in a record")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
