"""From a TOML file or the name of a ready Spec, and `--set`, to a Spec: all problems at once, or none.

Precedence: defaults < file < `--set`; environment variables are no source of settings.
`--set model.kind=...` and `--set data.kind=...` change the kind of a section: the file's keys that the new kind has too
stay, those that only the old kind has are left out, and `LoadedSpec.notes` says which.
A section without `kind` has the default one (model: decoder, data: stdlib).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fourfold.spec.draft import Draft, Origin
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.keys import DEFAULT_KINDS
from fourfold.spec.problems import problems_of
from fourfold.spec.ready import ready_names, ready_text, unknown_ready
from fourfold.spec.rules import require
from fourfold.spec.settings import parse_settings
from fourfold.spec.spec import Spec
from fourfold.spec.value import Value


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A Spec and its history.

    provenance  where each value that is not the default came from: `"batch.micro_batch": "tiny.toml:27"` or
                `"--set #1"` (the first `--set`); by dotted path, a list as one value
    text        the TOML text, verbatim
    notes       what was left out because a `--set` changed the kind of a section
    """

    spec: Spec
    provenance: Mapping[str, str]
    text: str
    notes: tuple[str, ...] = ()


def load_spec(source: str | Path, sets: Sequence[str] = (), world: int | None = None) -> LoadedSpec:
    """Read `source` (a TOML file, or the name of a ready Spec), put `sets` on top, and check all of it.

    A name without a folder or `.toml` that is a ready one means that one; `./NAME` means the file. `world`, where it
    is known already, only helps to say what to type instead of a layout.
    Raises SpecError with every problem found, each with its file line or `--set`: no such file, no TOML, unknown or
    misplaced keys (with the nearest), wrong types and values, unreadable settings; and if all that is well, every
    rule of `fourfold.spec.rules` that can never be broken.
    """
    text, file = _read(source)
    settings, unreadable = parse_settings(sets)
    draft = Draft.of_text(_parse(text, file, unreadable), text, file)
    found = [(Origin(setting=int(problem.where.rpartition("#")[2])), problem) for problem in unreadable]
    for setting in settings:
        try:
            draft.apply(setting)
        except SpecError as error:
            found += [(Origin(setting=setting.number), problem) for problem in error.problems]
    _fill(draft)
    spec, invalid = _validate(draft.raw)
    found += problems_of(invalid, draft)
    if spec is None or found:
        raise SpecError([problem for _, problem in sorted(found, key=lambda pair: pair[0])])
    provenance = {path: draft.where(path) for path in _non_defaults(spec, draft.raw, "")}
    require(spec, "always", provenance, world)
    return LoadedSpec(spec, provenance, text, tuple(draft.notes))


def _read(source: str | Path) -> tuple[str, str]:
    """The text, and the name of the file it stands in."""
    name = str(source)
    if not name.strip():
        raise SpecError(unknown_ready(name))
    if name in ready_names():
        return ready_text(name), f"{name}.toml"
    path = Path(source)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise SpecError(_no_file(name)) from None
    except IsADirectoryError:
        raise SpecError(_a_folder(path)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(
            Problem(f"the Spec {name!r}", reason.lower(), "the file cannot be read", "a file you may read")
        ) from None
    try:
        return data.decode("utf-8-sig"), path.name
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(
            Problem(
                asked=f"the Spec {name!r}",
                found=f"byte 0x{data[error.start]:02x} at offset {error.start}, which is no UTF-8",
                why="TOML is UTF-8 text",
                instead="save the file as UTF-8",
                where=f"{path.name}:{line}",
            )
        ) from None


def _no_file(name: str) -> Problem:
    path = Path(name)
    if path.suffix != ".toml" and path.name == name:
        return unknown_ready(name)
    if path.stem in ready_names():
        instead = f"{path.stem}, the ready Spec; or first: fourfold spec copy {path.stem} {name}"
    else:
        siblings = {sibling.stem: sibling for sibling in sorted(path.parent.glob("*.toml"))}
        near = difflib.get_close_matches(path.stem, siblings, n=1, cutoff=0.5)
        instead = str(siblings[near[0]]) if near else "the path of a TOML file; see: fourfold spec list"
    return Problem(
        f"the Spec {name!r}", "no such file", "a Spec is a TOML file or the name of a ready one", instead
    )


def _a_folder(path: Path) -> Problem:
    inside = sorted(path.glob("*.toml"), key=lambda file: file.name != "spec.toml")
    return Problem(
        asked=f"the Spec {str(path)!r}",
        found="a folder",
        why="a Spec is one TOML file",
        instead=str(inside[0]) if inside else "the path of a TOML file; see: fourfold spec list",
    )


def _parse(text: str, file: str, others: Sequence[Problem]) -> dict[str, Any]:
    """The raw values. A text that is no TOML hides what else is wrong in it, but not the `others` of the `--set`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
    place = re.search(r" \(at line (\d+), column (\d+)\)", message)
    lines = text.splitlines()
    number = int(place[1]) if place else len(lines)
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    problem = Problem(
        asked=line or "the end of the file",
        found=re.sub(r" \(at .*\)$", "", message).lower() + (f", at column {place[2]}" if place else ""),
        why="this is no TOML",
        instead=_toml_hint(line, message),
        where=f"{file}:{number}",
    )
    raise SpecError([problem, *others])


def _toml_hint(line: str, message: str) -> str:
    """What was probably meant by a line that is no TOML."""
    if "overwrite" in message or "twice" in message:
        return "each key and each section once"
    if "nclosed" in message or ("end of document" in message and "[" in line):
        return "the bracket or quote that closes it"
    if header := re.match(r"\[+\s*([\w.-]+)", line):
        return f"[{header[1]}]"
    assignment = re.match(r"([\w.\"-]+)\s*[:=]\s*([^#]*)", line)
    if assignment is None:
        return "key = value, or [section]"
    key, value = assignment[1], assignment[2].strip()
    if value.lower() in ("none", "null", ""):
        return f"leave {key} out for the default"
    words = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
    number = re.fullmatch(r"([+-]?)(\d*)\.(\d*)((?:[eE][+-]?\d+)?)", value)
    if value.lower() in words:
        return f"{key} = {words[value.lower()]}"
    if number:
        return f"{key} = {number[1]}{number[2] or 0}.{number[3] or 0}{number[4]}"
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        bare = value.strip("\"'")
        return f'{key} = "{bare}"' if re.fullmatch(r"[^\"'\[\]{}\\]+", bare) else "key = value, or [section]"
    return f"{key} = {value}"


def _fill(draft: Draft) -> None:
    """The name, from the file's; and the default kind of a section that gives none."""
    if "name" not in draft.raw:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(draft.file).stem).lstrip("._-")
        draft.raw["name"] = stem or "run"
    for section, kind in DEFAULT_KINDS.items():
        table = draft.raw.get(section)
        if isinstance(table, dict) and "kind" not in table:
            draft.raw[section] = {"kind": kind, **table}


def _validate(raw: dict[str, Any]) -> tuple[Spec | None, ValidationError | None]:
    try:
        return Spec.model_validate(raw), None
    except ValidationError as error:
        return None, error


def _non_defaults(value: Value, given: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name in given:
        path, current = f"{prefix}{name}", getattr(value, name)
        field = type(value).model_fields[name]
        if isinstance(current, Value):
            yield from _non_defaults(current, given[name], f"{path}.")
        elif current != field.get_default(call_default_factory=True):
            yield path
