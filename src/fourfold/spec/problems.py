"""What pydantic found, told for people: each problem with its place, the nearest key, and what to type instead."""

from __future__ import annotations

import contextlib
import copy
import difflib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fourfold.spec.draft import Draft, Origin
from fourfold.spec.errors import Problem
from fourfold.spec.keys import (
    Key,
    has_key,
    is_synonym,
    keys,
    kinds,
    nearest_key,
    nearest_section,
    sections,
    toml_word,
)
from fourfold.spec.settings import READS_AS

_REFUSED = "unknown keys are refused, so that no setting is silently ignored"


def problems_of(error: ValidationError | None, draft: Draft) -> list[tuple[Origin, Problem]]:
    """Every problem with its origin, in the order of the file, then of the `--set`; one problem a key."""
    found: dict[str, Problem] = dict(_beyond_pydantic(draft))
    for detail in error.errors(include_url=False, include_context=False) if error else ():
        place = _place(detail)
        path = _dotted(place)
        if detail["type"] == "extra_forbidden":
            found[path] = _unknown(place, detail["input"], draft)
        elif detail["type"] == "missing" and given_at(draft, place) is None:
            found[path] = _missing(place, draft)
        else:
            found[path] = _wrong_value(place, draft)
    return sorted(
        ((draft.origin(path), problem) for path, problem in found.items()), key=lambda pair: pair[0]
    )


def _place(detail: ErrorDetails) -> tuple[int | str, ...]:
    """pydantic's location without the names of union members, cut at the value that is wrong as a whole."""
    parts = list(detail["loc"])
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return (*parts, "kind")
    if kinds(str(parts[0])) and len(parts) > 1:
        del parts[1]
    for end in range(1, len(parts)):
        path = _key_path(parts[:end])
        if path in keys() and not any(key.startswith(f"{path}.") for key in keys()):
            return tuple(parts[:end])
    if isinstance(parts[-1], int):
        return tuple(parts[:-1])
    return tuple(parts)


def _dotted(place: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in place)


def _key_path(place: list[int | str] | tuple[int | str, ...]) -> str:
    return ".".join(part for part in place if isinstance(part, str))


def _unknown(place: tuple[int | str, ...], value: object, draft: Draft) -> Problem:
    path, key_path = _dotted(place), _key_path(place)
    origin = draft.origin(path)
    if len(place) == 1 and isinstance(value, Mapping):
        return _unknown_section(path, value, draft)
    section, leaf = str(place[0]), str(place[-1])
    kind = draft.kind(section) if len(place) > 1 else None
    if kind and has_key(key_path):
        return _key_of_another_kind(path, section, value, kind, draft)
    table = key_path.rpartition(".")[0]
    near = nearest_key(key_path, kind)
    if near is None:
        names = sorted(
            key.leaf for key in keys().values() if key.section == table and has_key(key.path, kind)
        )
        why = f"{_REFUSED}; [{table}] takes {', '.join(names)}" if table else _REFUSED
        instead = "leave it out, or see what there is: fourfold spec show tiny"
    else:
        why = _why_unknown(leaf, near, table)
        home = (*place[:-1], near.leaf) if near.section == table else tuple(near.path.split("."))
        instead = draft.spell(_dotted(home), _kept(value, home, draft), origin)
    holder = f'{section} kind "{kind}"' if kind and table == section else f"[{table}]" if table else "a Spec"
    return Problem(_asked(path, value), f"not a key of {holder}", why, instead, draft.where(path))


def _why_unknown(leaf: str, near: Key, section: str) -> str:
    if is_synonym(leaf, near):
        return f'what others call "{leaf}" is {near.path} here'
    if near.section == section:
        return _REFUSED
    home = f"in [{near.section}]" if near.section else "above the first [section]"
    return f'"{near.leaf}" belongs {home}'


def _key_of_another_kind(path: str, section: str, value: object, kind: str, draft: Draft) -> Problem:
    others = [f'"{other}"' for other in keys()[_key_path(tuple(path.split(".")))].kinds]
    given = f"{section}.kind" in draft.origins
    changes = [draft.spell(f"{section}.kind", other, draft.origin(path)) for other in others]
    return Problem(
        asked=_asked(path, value),
        found=f'not a key of {section} kind "{kind}"' + ("" if given else " (the default kind)"),
        why=f"only {section} kind {' and '.join(others)} {'has' if len(others) == 1 else 'have'} it",
        instead=f"leave it out or {' or '.join(changes)}",
        where=draft.where(path),
    )


def _unknown_section(name: str, table: Mapping[str, Any], draft: Draft) -> Problem:
    near = nearest_section(name)
    homes = {leaf: nearest_key(f"{near or ''}.{leaf}") for leaf in table}
    moves = [f"{key.leaf} under [{key.section}]" for key in homes.values() if key and key.section != near]
    if near and not moves:
        instead = f"[{near}]"
    else:
        stay = [f"[{near}]"] if near and len(moves) < len(table) else []
        instead = ", ".join(stay + moves) or "leave it out"
    return Problem(
        asked=f"[{name}]",
        found="not a section of a Spec",
        why=f"the sections are {', '.join(sorted(sections()))}",
        instead=instead,
        where=draft.where(name),
    )


def _missing(place: tuple[int | str, ...], draft: Draft) -> Problem:
    if place == ("model",):
        return Problem(
            asked="a Spec",
            found="no [model]",
            why="every setting has a default but the model: what is to be trained?",
            instead="a [model] section; `fourfold spec copy tiny` writes a whole Spec to start from",
            where=draft.file,
        )
    path, section = _dotted(place), _dotted(place[:-1])
    kind = draft.kind(section)
    cause = f"{section}.kind" if kind else section
    return Problem(
        asked=f"[{section}]" + (f' of kind "{kind}"' if kind else ""),
        found=f"no {place[-1]}",
        why=f"{_key_path(place)} has no default",
        instead=draft.spell(path, f"<{keys()[_key_path(place)].expects}>", draft.origin(cause)),
        where=draft.where(cause),
    )


def _wrong_value(place: tuple[int | str, ...], draft: Draft) -> Problem:
    path, key_path, value = _dotted(place), _key_path(place), given_at(draft, place)
    expects = keys()[key_path].expects
    if expects == "a section of keys":
        inside = [key.leaf for key in keys().values() if key.section == key_path]
        in_file = f"[{path}], and below it its keys ({', '.join(inside)})"
        instead = f"--set {path}.{inside[0]}=VALUE" if draft.origin(path).setting else in_file
    else:
        mended = next((other for other in _mends(value, expects) if _accepts(draft, place, other)), None)
        instead = draft.spell(
            path, toml_word(mended) if mended is not None else f"<{expects}>", draft.origin(path)
        )
    return Problem(
        _asked(path, value), _describe(value), f"{path} takes {expects}", instead, draft.where(path)
    )


def given_at(draft: Draft, place: tuple[int | str, ...]) -> Any:
    """The value at `place` as given; None (which TOML does not have) where none is."""
    node: Any = draft.raw
    for part in place:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def _mends(value: object, expects: str) -> Iterator[object]:
    """Values that may have been meant by `value`, likeliest first."""
    options = [word.strip('"') for word in expects.replace(" or ", ", ").split(", ") if word.startswith('"')]
    if isinstance(value, str):
        word = value.strip().lower()
        with contextlib.suppress(tomllib.TOMLDecodeError):
            yield tomllib.loads(f"value = {READS_AS.get(word, word)}")["value"]
        yield from difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    elif isinstance(value, bool):
        yield from () if expects.startswith("a ") else (int(value),)
    elif isinstance(value, int | float):
        if value == value // 1:
            yield int(value)
        if value in (0, 1):
            yield bool(value)
        yield toml_word(value)
        yield from (0, 1) if isinstance(value, int) and value < 1 else ()
    elif isinstance(value, list):
        yield [next(_mends(item, ""), item) if isinstance(item, str) else item for item in value]
    else:
        yield str(value)


def _accepts(draft: Draft, place: tuple[int | str, ...], value: object) -> bool:
    """Whether the Spec takes `value` at `place`."""
    from fourfold.spec.spec import Spec

    raw = copy.deepcopy(draft.raw)
    node: Any = raw
    for part in place[:-1]:
        node = node[part]
    node[place[-1]] = value
    try:
        Spec.model_validate(raw)
    except ValidationError as error:
        return all(_place(detail) != place for detail in error.errors())
    return True


def _beyond_pydantic(draft: Draft) -> Iterator[tuple[str, Problem]]:
    """What pydantic lets pass: true for the literal 1; what JSON cannot hold in the arguments of an own model."""
    if isinstance(given_at(draft, ("layout", "zero")), bool | float):
        yield "layout.zero", _wrong_value(("layout", "zero"), draft)
    arguments = given_at(draft, ("model", "args"))
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        if not _is_json(value):
            path = f"model.args.{name}"
            yield (
                path,
                Problem(
                    asked=_asked(path, value),
                    found=_describe(value),
                    why="the Spec is saved as JSON, which holds text, finite numbers, true, false, lists and tables",
                    instead=draft.spell(path, toml_word(str(value)), draft.origin(path)),
                    where=draft.where(path),
                ),
            )


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_json(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    if isinstance(value, float):
        return abs(value) != float("inf") and value == value
    return isinstance(value, str | int)


def _kept(value: object, place: tuple[int | str, ...], draft: Draft) -> str:
    """`value` as typed, if the key at `place`, which it should have had, takes it; else what that key takes."""
    raw = copy.deepcopy(draft.raw)
    node: Any = raw
    for part in place[:-1]:
        node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
        if not isinstance(node, dict | list):
            return f"<{keys()[_key_path(place)].expects}>"
    fits = _accepts(Draft(raw, draft.file), place, value)
    return toml_word(value) if fits else f"<{keys()[_key_path(place)].expects}>"


def _asked(path: str, value: object) -> str:
    if isinstance(value, Mapping):
        return f"[{path}]"
    word = toml_word(value)
    return f"{path} = {word if len(word) <= 60 else word[:57] + '...'}"


def _describe(value: object) -> str:
    if isinstance(value, bool):
        return f"the truth value {toml_word(value)}"
    if isinstance(value, int):
        return f"the whole number {value}"
    if isinstance(value, float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {toml_word(value)}" if value else "an empty text"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "a section of keys"
    return f"a {type(value).__name__}"
