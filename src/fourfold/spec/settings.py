"""`--set a.b=value`: one setting of the command line.

The value is TOML: `--set run.steps=20`, `--set optimizer.betas=[0.9,0.99]`, `--set 'model.moe={experts=4,top_k=2}'`.
It replaces what was there, whole. A word that is no TOML value is taken as text where nothing else can be meant:
it starts with a letter or one of `_ ~ / .` (then no digit), has no space, quote, bracket, comma, `#` or `=`, and is
not a word that reads as a truth value, a number or "nothing" (`True`, `yes`, `off`, `NaN`, `None`, ...); or it is like
`1f1b`, digits and letters by turns. So `--set run.dir=runs/x`, `--set data.kind=jsonl` and `--set
layout.pp_schedule=1f1b` need no quotes. Of two settings of one key the later one holds.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.keys import toml_word

_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_BARE_WORD = re.compile(r"(?![.]\d)[A-Za-z_~/.][^\s\"'\[\]{}#,=\\]*|\d+[A-Za-z]+\d+[A-Za-z]+")
# Words that read as a TOML truth value, or as nothing that TOML has.
READS_AS = {
    **dict.fromkeys(("true", "yes", "on"), "true"),
    **dict.fromkeys(("false", "no", "off"), "false"),
    **dict.fromkeys(("none", "null", "nil"), ""),
    **dict.fromkeys(("nan", "inf", "infinity"), ""),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """`number` counts the `--set` of a command line from 1; `text` is what was typed."""

    number: int
    text: str
    path: tuple[str, ...]
    value: object


def parse_settings(texts: Sequence[str]) -> tuple[list[Setting], list[Problem]]:
    """The settings that can be read, and the problems of those that cannot."""
    settings: list[Setting] = []
    problems: list[Problem] = []
    for number, text in enumerate(texts, start=1):
        try:
            settings.append(parse_setting(text, number))
        except SpecError as error:
            problems += error.problems
    return settings, problems


def parse_setting(text: str, number: int = 1) -> Setting:
    """One `a.b=value`. Raises SpecError where it has no `=`, no dotted key, or no TOML value."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not _PATH.fullmatch(path):
        raise SpecError(
            Problem(
                asked=f"--set {text}",
                found="no key before a =" if equals else "no =",
                why="a setting is a dotted key, = and a TOML value, without spaces around the =",
                instead=f"--set {path or 'run.steps'}=VALUE" if not equals else "--set run.steps=20",
                where=f"--set #{number}",
            )
        )
    return Setting(number, text, tuple(path.split(".")), _value(text, path, value.strip(), number))


def typed(path: str, value: str) -> str:
    """`--set path=value` for a TOML value, quoted for a shell, without the quotes of a text that needs none."""
    bare = value[1:-1]
    if value[:1] == '"' and _BARE_WORD.fullmatch(bare) and bare.lower() not in READS_AS:
        value = bare
    return f"--set {shlex.quote(f'{path}={value}')}"


def _value(text: str, path: str, word: str, number: int) -> object:
    try:
        document = tomllib.loads(f"value = {word}")
        if len(document) == 1:
            return document["value"]
        detail = "more than one line"
    except tomllib.TOMLDecodeError as error:
        if _BARE_WORD.fullmatch(word) and word.lower() not in READS_AS:
            return word
        detail = str(error).partition(" (")[0].lower()
    raise SpecError(
        Problem(
            asked=f"--set {text}",
            found=f"{word!r}: {detail}" if word else "nothing after the =",
            why="the value is TOML; only a plain word that can be nothing else is taken as text without quotes",
            instead=_instead(path, word),
            where=f"--set #{number}",
        )
    )


def _instead(path: str, word: str) -> str:
    as_text = f"--set '{path}={toml_word(word)}' for the text"
    meant = READS_AS.get(word.lower())
    if not word:
        return f"--set {path}=VALUE or leave it out for the default"
    if meant:
        return f"--set {path}={meant} or {as_text}"
    if meant == "":
        return f"leave --set {path} out for the default or {as_text}"
    if re.fullmatch(r"[+-]?\.\d+", word):
        return f"--set {path}={word.replace('.', '0.', 1)}"
    if re.fullmatch(r"[+-]?\d+\.(e[+-]?\d+)?", word):
        return f"--set {path}={word.replace('.', '.0', 1)}"
    return as_text
