"""A Spec not yet checked: the values as given, and where each one came from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.keys import DEFAULT_KINDS, has_key, kinds, toml_word
from fourfold.spec.lines import key_lines
from fourfold.spec.settings import Setting, typed


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Where a value came from: a line of the file, or else the number of a `--set` (both from 1; 0 is neither)."""

    setting: int = 0
    line: int = 0


@dataclass
class Draft:
    """Raw values by section and key; `file` names the text they came from, `notes` tell what was left out."""

    raw: dict[str, Any]
    file: str
    origins: dict[str, Origin] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_text(cls, raw: dict[str, Any], text: str, file: str) -> Draft:
        """The draft of a parsed TOML text."""
        return cls(raw, file, {path: Origin(line=line) for path, line in key_lines(text).items()})

    def origin(self, path: str) -> Origin:
        """Of `path`, or of the nearest table around it."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path, Origin())

    def where(self, path: str) -> str:
        """`file:line`, `--set #n`, or the file alone."""
        origin = self.origin(path)
        if origin.setting:
            return f"--set #{origin.setting}"
        return f"{self.file}:{origin.line}" if origin.line else self.file

    def spell(self, path: str, value: str, origin: Origin) -> str:
        """How to type `path` with a value where the user typed before: in the file, or as a `--set`."""
        section, _, leaf = path.rpartition(".")
        if origin.setting:
            return typed(path, value)
        table, _, item = section.rpartition(".")
        if not section:
            return f"{leaf} = {value}, above the first [section]"
        return f"{leaf} = {value}, " + (
            f"in item {item} of {table} (from 0)" if item.isdigit() else f"under [{section}]"
        )

    def kind(self, section: str) -> str | None:
        """The kind of `[model]` or `[data]`, given or by default; None for sections without kinds."""
        table = self.raw.get(section)
        given = table.get("kind") if isinstance(table, dict) else None
        return given if isinstance(given, str) else DEFAULT_KINDS.get(section)

    def apply(self, setting: Setting) -> None:
        """Put one `--set` on top. Raises SpecError where its path leads through a value."""
        *parents, leaf = setting.path
        node = self.raw
        for depth, part in enumerate(parents):
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise SpecError(_no_table(setting, ".".join(setting.path[: depth + 1]), child))
            node = child
        if leaf == "kind" and len(parents) == 1:
            self._change_kind(parents[0], setting)
        node[leaf] = copy.deepcopy(setting.value)
        path = ".".join(setting.path)
        for known in [known for known in self.origins if known.startswith(f"{path}.")]:
            del self.origins[known]
        self.origins[path] = Origin(setting=setting.number)
        for depth in range(1, len(setting.path)):
            self.origins.setdefault(".".join(setting.path[:depth]), Origin(setting=setting.number))

    def _change_kind(self, section: str, setting: Setting) -> None:
        """Leave out the file's keys that the old kind has and the new one has not."""
        old, new, table = self.kind(section), setting.value, self.raw[section]
        if new not in kinds(section) or old not in kinds(section) or old == new:
            return
        for key in list(table):
            path = f"{section}.{key}"
            if has_key(path, old) and not has_key(path, str(new)) and not self.origin(path).setting:
                self.notes.append(
                    f'{self.where(path)}: {path} left out, for --set #{setting.number} makes {section}.kind "{new}"'
                )
                del table[key]


def _no_table(setting: Setting, path: str, value: object) -> Problem:
    if isinstance(value, Mapping | list):
        instead = f"the whole list: --set '{path}=[...]'"
    else:
        instead = f"--set {path}={toml_word(value)}"
    return Problem(
        asked=f"--set {setting.text}",
        found=f"{path} = {toml_word(value)}",
        why=f"{path} is a value, not a section, so it has no key {setting.path[-1]!r}",
        instead=instead,
        where=f"--set #{setting.number}",
    )
