"""A Spec as TOML again, with a remark beside each value that needs one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fourfold.spec.keys import toml_key, toml_word
from fourfold.spec.spec import Spec
from fourfold.spec.value import Value

_REMARKS_FROM = 32  # column of the remarks, where the values leave room


def to_toml(spec: Spec, remarks: Mapping[str, str] | None = None) -> str:
    """`spec` as TOML that loads as the same Spec; every key that is set, with `remarks[path]` as its comment.

    Keys that are None (which TOML does not have) stand as a comment, so that they can be found.
    """
    return "\n".join(_section("", spec, remarks or {})).lstrip("\n") + "\n"


def changed(asked: Spec, settled: Spec, provenance: Mapping[str, str], world: int) -> str:
    """Every setting that is no default, a line each as in TOML, with where it came from.

    provenance: of `asked`, as loaded; `settled` for `world` ranks.
    """
    remarks = {**provenance, **computed(asked, settled, world)}
    lines = []
    for path, remark in remarks.items():
        value: Any = settled
        for key in path.split("."):
            value = value[key] if isinstance(value, Mapping) else getattr(value, key)
        lines.append(_with_remark(f"{path} = {toml_word(_plain(value))}", remark))
    return "\n".join(lines)


def computed(before: Spec, after: Spec, world: int | None) -> dict[str, str]:
    """Remarks on the settings that met the world size: those that settling has changed."""
    return {
        f"{section}.{key}": f"world {world}"
        for section in ("layout", "batch")
        for key, value in getattr(after, section)
        if value != getattr(getattr(before, section), key)
    }


def _section(path: str, value: Value, remarks: Mapping[str, str]) -> Iterator[str]:
    if path:
        yield from ("", f"[{path}]")
    tables: list[tuple[str, Value]] = []
    for name in sorted(type(value).model_fields, key=lambda name: name != "kind"):
        item, inner = getattr(value, name), f"{path}.{name}" if path else name
        if isinstance(item, Value):
            tables.append((inner, item))
        elif item is None:
            yield _with_remark(f"# {name}", "not given")
        else:
            yield _with_remark(f"{toml_key(name)} = {toml_word(_plain(item))}", _remark(inner, remarks))
    for inner, table in tables:
        yield from _section(inner, table, remarks)


def _remark(path: str, remarks: Mapping[str, str]) -> str:
    """Of the key itself, or of what stands in it (a table written on one line)."""
    inside = [remark for known, remark in remarks.items() if known.startswith(f"{path}.")]
    return remarks.get(path) or ", ".join(dict.fromkeys(inside))


def _with_remark(text: str, remark: str) -> str:
    return f"{text:<{_REMARKS_FROM}} # {remark}" if remark else text


def _plain(item: Any) -> Any:
    if isinstance(item, Value):
        return item.model_dump()
    return [_plain(part) for part in item] if isinstance(item, tuple) else item
