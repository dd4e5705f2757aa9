"""Whether a folder is a whole checkpoint: its manifest, every byte of every file, every tensor in its place.

Reads only; nothing read is executed. What cannot be read is a problem like any other.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import quote
from typing import Any

import xxhash
from pydantic import ValidationError

from fourfold import __version__
from fourfold.checkpoint.manifest import MANIFEST, SCHEMA, SEAL, STATE, FileRecord, Manifest
from fourfold.checkpoint.problems import damaged
from fourfold.checkpoint.tensors import coverage_problems, stored_problems
from fourfold.spec.errors import DataError, Problem

WHOLE = "the manifest is whole, and of a version known here"
SIZES = "every file is there, with its size"
HASHES = "every file has the hash it was written with"
NO_FOREIGN = "no other file lies among them"
COVERED = "the chunks of every tensor cover it exactly once"
STORED = "every chunk lies in its file, with its dtype and shape"
CLAIMS = (WHOLE, SIZES, HASHES, NO_FOREIGN, COVERED, STORED)

Checks = dict[str, list[Problem]]  # by claim, in order of checking; a claim left out could not be checked

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BLOCK_BYTES = 4 * 2**20


def validate(folder: Path | str, *, hashes: bool = True) -> list[Problem]:
    """All that is wrong with a checkpoint; nothing if it is whole.

    Without `hashes` no tensor's bytes are read: sizes, headers and the manifest still are.
    """
    return [problem for problems in examine(folder, hashes=hashes).values() for problem in problems]


def examine(folder: Path | str, *, hashes: bool = True) -> Checks:
    """`validate`, claim by claim."""
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        return {WHOLE: list(error.problems)}
    checks: Checks = {WHOLE: []}
    checks[SIZES], sound = _sizes(folder, manifest.files)
    if hashes:
        checks[HASHES], sound = _hashes(folder, {name: manifest.files[name] for name in sound})
    checks[NO_FOREIGN] = _foreign(folder, manifest.files)
    checks[COVERED] = coverage_problems(manifest, folder)
    checks[STORED] = stored_problems(manifest, folder, sound)
    return checks


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest of a checkpoint, its seal unbroken; DataError names a newer version as such."""
    folder = Path(folder)
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise DataError(_unreadable(folder, error)) from error
    except (ValueError, RecursionError) as error:
        raise DataError(_damaged(folder, f"not JSON: {error}")) from error
    if not isinstance(body, dict):
        raise DataError(_damaged(folder, f"{type(body).__name__}, not an object"))
    if body.get("schema") != SCHEMA:
        raise DataError(_other_schema(folder, body.get("schema")))
    if SEAL not in body:
        raise DataError(_damaged(folder, "no seal"))
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        raise DataError([_damaged(folder, _told(entry)) for entry in error.errors()]) from error
    odd = [name for name in manifest.files if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST]
    problems = [_damaged(folder, f"{name!r} is no name of a file beside it") for name in odd]
    if STATE not in manifest.files:
        problems.append(_damaged(folder, f"no {STATE} among its files"))
    if problems:
        raise DataError(problems)
    return manifest


def _sizes(folder: Path, files: Mapping[str, FileRecord]) -> tuple[list[Problem], list[str]]:
    """What is missing or of another size, and the names of those that are neither."""
    problems, sound = [], []
    for name, record in files.items():
        try:
            found = os.lstat(folder / name)
        except OSError as error:
            problems.append(_file_problem(folder, name, error.strerror or str(error)))
            continue
        if not stat.S_ISREG(found.st_mode):
            problems.append(_file_problem(folder, name, "not a plain file"))
        elif found.st_size != record.bytes:
            problems.append(_file_problem(folder, name, f"{found.st_size:,} bytes, not {record.bytes:,}"))
        else:
            sound.append(name)
    return problems, sound


def _hashes(folder: Path, files: Mapping[str, FileRecord]) -> tuple[list[Problem], list[str]]:
    """What has other bytes than were written, and the names of what has not."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        founds = list(threads.map(_hash, (folder / name for name in files)))
    problems, sound = [], []
    for (name, record), found in zip(files.items(), founds, strict=True):
        if isinstance(found, OSError):
            problems.append(_file_problem(folder, name, found.strerror or str(found)))
        elif found != record.xxh3_128:
            problems.append(_file_problem(folder, name, f"its hash is {found}, not {record.xxh3_128}"))
        else:
            sound.append(name)
    return problems, sound


def _hash(path: Path) -> str | OSError:
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES))
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
    except OSError as error:
        return error
    return str(digest.hexdigest())


def _foreign(folder: Path, files: Iterable[str]) -> list[Problem]:
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        return [_unreadable(folder, error)]
    why = "the manifest does not know it: it was not saved with this checkpoint"
    return [
        damaged(folder, name, "a foreign file", why, f"mv {quote(str(folder / name))} somewhere else")
        for name in sorted(names - {MANIFEST, *files})
    ]


def _file_problem(folder: Path, name: str, found: str) -> Problem:
    return damaged(folder, name, found, "it is not as it was saved")


def _damaged(folder: Path, found: str) -> Problem:
    return damaged(folder, MANIFEST, found, "without a whole manifest nothing in the folder can be trusted")


def _unreadable(folder: Path, error: OSError) -> Problem:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        found = "not there" if folder.is_dir() else "no such folder"
        why = "the manifest is written last: without it the folder is no checkpoint, or an unfinished one"
        return damaged(folder, MANIFEST, found, why)
    return _damaged(folder, error.strerror or str(error))


def _other_schema(folder: Path, schema: Any) -> Problem:
    family, _, version = str(schema).rpartition("/")
    if family != SCHEMA.rpartition("/")[0]:
        return _damaged(folder, f"schema {schema!r}, not {SCHEMA!r}")
    return damaged(
        folder,
        MANIFEST,
        f"format version {version}, schema {str(schema)!r}",
        f"Fourfold {__version__} knows {SCHEMA} only: a newer Fourfold wrote this"
        if version.isdigit()
        else f"Fourfold {__version__} knows {SCHEMA} only",
        "pip install --upgrade fourfold",
    )


def _told(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"])
    return f"{place}: {error['msg']}" if place else str(error["msg"]).removeprefix("Value error, ")
