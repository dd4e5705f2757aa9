"""What a verb prints: the result on stdout, the story on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any, Literal, TextIO

from fourfold.record.aloud import say
from fourfold.spec.errors import Problem

WIDTH = 80
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}


def print_document(document: Mapping[str, Any]) -> None:
    """The one JSON document of `--json`, on stdout; its `schema` names kind and version, as in "fourfold.spec/1"."""
    from fourfold.record.writer import dumps

    assert "schema" in document, "every document names its schema"
    print(dumps(document, indent=2))


def print_error(command: str, exit_code: int, problems: Sequence[Problem]) -> None:
    """The document of a verb that came to none of its own: a request refused, data not readable, a bug of ours.

    Whoever reads a verdict and findings from a verb's document finds them here, too, and never "pass".
    """
    print_document(
        {
            "schema": "fourfold.error/1",
            "verdict": "fail",
            "command": command,
            "exit_code": exit_code,
            "problems": [asdict(problem) for problem in problems],
            "findings": [],
        }
    )


def story(text: str) -> None:
    """What happens meanwhile, for the person who waits: on stderr."""
    say(text)


def next_command(*commands: str) -> None:
    """The next sensible command, or several, on stderr: how a finished verb ends. Each can be pasted."""
    for number, command in enumerate(commands):
        story(f"{'next: ' if number == 0 else '  or: '}{_as_typed(command)}")


def _as_typed(command: str) -> str:
    """`fourfold …` or `python …` by the path that this program was called by, if its plain name finds it not."""
    me = Path(sys.argv[0])
    program, space, rest = command.partition(" ")
    if me.name != "fourfold" or not me.is_file() or program not in ("fourfold", "python"):
        return command
    found = shutil.which("fourfold")
    if found is not None and os.path.samefile(found, me):
        return command
    beside = me.with_name(program)
    return quote(str(beside)) + space + rest if beside.exists() else command


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH) -> str:
    """A table of at most `width` columns, of which the last cell of a row is broken into lines where it must be."""
    every = [list(heads), *(list(row) for row in rows)]
    sizes = [max(len(row[column]) for row in every) for column in range(len(heads) - 1)]
    left = sum(sizes) + 2 * len(sizes)
    lines = []
    for row in every:
        start = "".join(f"{cell:<{size}}  " for cell, size in zip(row, sizes, strict=False))
        broken = textwrap.wrap(row[-1], max(width - left, 20)) or [""]
        lines += [(start + broken[0]).rstrip(), *(" " * left + more for more in broken[1:])]
    return "\n".join(lines)


def wrapped(text: str, indent: int = 1) -> list[str]:
    """`text` in lines of at most `WIDTH` columns, later ones indented twice as far; no name is broken at a hyphen."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * 2 * indent, break_on_hyphens=False
    )


def paint(text: str, colour: Literal["red", "green", "yellow", "bold"], stream: TextIO) -> str:
    """`text` in colour where `stream` is a terminal; `NO_COLOR` (https://no-color.org) is respected."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"
