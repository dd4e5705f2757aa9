"""Readers of documents: the standard library, text files, JSON lines.

Each yields documents as pieces of bytes, so that the same reader fills an array or a file larger than memory.
What is wrong is collected, up to 20 places, and raised when everything has been read.
"""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fourfold.spec.errors import DataError, Problem
from fourfold.spec.settings import typed

Documents = Iterator[Iterable[bytes]]

_MOST_PROBLEMS = 20
_PIECE = 1 << 20  # bytes read at a time

# Not the library itself: installed packages, its tests, and two programs that ship with it.
_NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}


def stdlib() -> Documents:
    """The running Python's own sources, by relative path: one document a file, the bytes as they are."""
    root = sysconfig.get_path("stdlib")
    paths = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths = [path for path in paths if path.is_file()]  # a distribution may leave links that lead nowhere
    if not paths:
        raise DataError(
            Problem(
                asked="the sources of this Python's standard library as text",
                found=f"no *.py file in {root}",
                why="this Python was installed without its sources",
                instead="--set data.kind=text --set data.path=FILE",
            )
        )
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        yield [_read(path)]


def text(path: str) -> Documents:
    """UTF-8 text: a file is one document; in a folder each `*.txt` file below it is one, by relative path."""
    root = located(path, "text")
    files = [root]
    if root.is_dir():
        files = sorted(root.rglob("*.txt"), key=lambda file: file.relative_to(root).as_posix())
        if not files:
            raise DataError(_folder_without_text(root))
    problems: list[Problem] = []
    for file in files:
        yield _text_pieces(file, problems)
        if len(problems) == _MOST_PROBLEMS:
            break
    if problems:
        raise DataError(problems)


def jsonl(path: str, field: str) -> Documents:
    """JSON lines: the string in `field` of each line is one document; blank lines are passed over."""
    file = located(path, "JSON lines")
    problems: list[Problem] = []
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                document = _document_of(line, field, f"{file}:{number}", first=number == 1)
                if isinstance(document, Problem):
                    problems.append(document)
                    if len(problems) == _MOST_PROBLEMS:
                        break
                else:
                    yield [document]
    except OSError as error:
        raise DataError(_unreadable(file, error)) from error
    if problems:
        raise DataError(_told_once(problems))


def _told_once(problems: list[Problem]) -> list[Problem]:
    """The same fault in many lines is one problem, with all their places."""
    places: dict[Problem, list[str]] = {}
    for problem in problems:
        places.setdefault(replace(problem, where=""), []).append(problem.where)
    more = ", and the lines after it were not read" if len(problems) == _MOST_PROBLEMS else ""
    told = []
    for problem, (first, *others) in places.items():
        lines = ", ".join(place.rpartition(":")[2] for place in others)
        where = f"{first} (and lines {lines}{more})" if others else first
        told.append(replace(problem, where=where))
    return told


def located(path: str, what: str) -> Path:
    """The absolute path of something that exists; DataError with the nearest name beside it otherwise."""
    place = Path(os.path.abspath(Path(path).expanduser()))
    if place.exists():
        return place
    beside = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    near = get_close_matches(place.name, beside, n=1)
    raise DataError(
        Problem(
            asked=f"{what} from {path}",
            found="no such file or folder"
            + ("" if place.parent.is_dir() else f", nor the folder {place.parent}"),
            why="there is nothing to train on",
            instead=str(place.parent / near[0]) if near else "the path of an existing file",
        )
    )


def no_text(name: str, documents: int) -> Problem:
    """Every document is empty, or there is none."""
    return Problem(
        asked=f"text to train on from {name}",
        found=f"{documents} documents, all of them empty" if documents else "no document at all",
        why="there is nothing to predict",
        instead="a file with text in it",
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(_unreadable(path, error)) from error


def _text_pieces(path: Path, problems: list[Problem]) -> Iterator[bytes]:
    """The file in pieces; at the first byte that is not text, its problem is noted and the rest left unread."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    start, line = 0, 1  # of the piece
    try:
        with path.open("rb") as file:
            while True:
                piece = file.read(_PIECE)
                bad = _bad_byte(decoder, piece)
                if bad is not None:
                    place, found = bad
                    line += piece.count(b"\n", 0, max(place, 0))
                    problems.append(_not_text(path, f"{found} at byte {start + place}, line {line}"))
                    return
                if not piece:
                    return
                yield piece
                start += len(piece)
                line += piece.count(b"\n")
    except OSError as error:
        raise DataError(_unreadable(path, error)) from error


def _bad_byte(decoder: codecs.IncrementalDecoder, piece: bytes) -> tuple[int, str] | None:
    """Where in the piece the text ends being text, and what stands there; an empty piece ends the file.

    The place is negative for a character that was cut by the beginning of the piece.
    """
    held = len(decoder.getstate()[0])
    nul = piece.find(0)
    try:
        decoder.decode(piece, final=not piece)
    except UnicodeDecodeError as error:
        place = error.start - held
        if nul < 0 or place < nul:
            return place, f"bytes that are not UTF-8 ({error.reason})"
    return (nul, "a NUL byte") if nul >= 0 else None


def _document_of(line: bytes, field: str, where: str, first: bool) -> bytes | Problem:
    """The document in one JSON line, or what is wrong with the line."""

    def bad(found: str, why: str, instead: str) -> Problem:
        return Problem(f'a JSON object with text in "{field}"', found, why, instead, where)

    try:
        value: Any = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        return bad(
            f"bytes that are not UTF-8 at byte {error.start} of the line",
            "JSON is UTF-8",
            "the line as UTF-8",
        )
    except (json.JSONDecodeError, RecursionError) as error:
        return bad(
            f"no JSON: {error}", "each line is one JSON object", json.dumps({field: "…"}, ensure_ascii=False)
        )
    if not isinstance(value, dict):
        return bad(
            f"a JSON {_json_name(value)}",
            "only an object has fields",
            json.dumps({field: "…"}, ensure_ascii=False),
        )
    if field not in value:
        near = (
            get_close_matches(field, value, n=1)
            or [name for name in value if isinstance(value[name], str)][:1]
        )
        fields = ", ".join(map(repr, value)) or "(none)"
        return bad(
            f"the fields {fields}",
            f"there is no {field!r}",
            f"{typed('data.field', json.dumps(near[0]))}; of data prepare: --field {near[0]}" if near else "",
        )
    document = value[field]
    if not isinstance(document, str):
        return bad(f"a {_json_name(document)} in it", "only a string is text", "a field that holds strings")
    if "\0" in document:
        return bad(
            f"a NUL character, the {document.index(chr(0)) + 1}. of the text",
            _NUL_IS_END,
            "the text without it",
        )
    try:
        return document.encode("utf-8")
    except UnicodeEncodeError as error:
        return bad(
            f"half a surrogate pair, character {error.start + 1}",
            "it has no UTF-8 form",
            "the whole character",
        )


_NUL_IS_END = "byte 0 is the end mark of a document"


def _json_name(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _not_text(path: Path, found: str) -> Problem:
    return Problem(
        asked="a file of UTF-8 text",
        found=found,
        why=_NUL_IS_END if "NUL" in found else "the text would not be what its author wrote",
        instead="the file saved as UTF-8 text, or another file",
        where=str(path),
    )


def _folder_without_text(root: Path) -> Problem:
    others = sorted({path.suffix for path in root.rglob("*") if path.is_file()})
    return Problem(
        asked=f"the *.txt files in {root}",
        found=f"none; there are {', '.join(others)} files" if others else "none; the folder is empty",
        why="there is nothing to train on",
        instead="the path of one file, or files named *.txt",
    )


def _unreadable(path: Path, error: OSError) -> Problem:
    return Problem(
        asked=f"to read {path}",
        found=error.strerror or str(error),
        why="the text cannot be read",
        instead="a file that this user may read",
    )
