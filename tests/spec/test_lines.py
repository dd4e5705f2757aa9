"""Line numbers of TOML keys: against texts whose lines are known, and against whatever `tomllib` reads."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fourfold.spec.lines import key_lines
from fourfold.spec.ready import ready_names, ready_text

TEXT = '''\
name = "a # no comment" # a comment
a.b = 1
[one] # [not.this]
x = """
y = 3
""\\"
[still] = text"""
list = [
    1, # ] x = 3
    "]",
]
inline = { p = 1, q = [1,
  2] }
[one.two]
'single' = '[quoted]'
"dou\\"ble" = 2

[[many]]
k = 1
[[many]]
k = 2
[many.sub]
z = 3
'''


def test_every_kind_of_line() -> None:
    assert tomllib.loads(TEXT)
    assert key_lines(TEXT) == {
        "name": 1,
        "a": 2,
        "a.b": 2,
        "one": 3,
        "one.x": 4,
        "one.list": 8,
        "one.inline": 12,
        "one.two": 14,
        "one.two.single": 15,
        'one.two.dou\\"ble': 16,
        "many": 18,
        "many.0": 18,
        "many.0.k": 19,
        "many.1": 20,
        "many.1.k": 21,
        "many.1.sub": 22,
        "many.1.sub.z": 23,
    }


def test_empty_and_crlf() -> None:
    assert key_lines("") == {}
    assert key_lines("# only\n") == {}
    assert key_lines("a = 1\r\n\r\n[b]\r\nc = 2\r\n") == {"a": 1, "b": 3, "b.c": 4}


def test_ready_specs_have_every_key() -> None:
    for name in ready_names():
        text = ready_text(name)
        lines, source = key_lines(text), text.splitlines()
        for path in paths(tomllib.loads(text), ""):
            leaf = path.rpartition(".")[2]
            assert leaf in source[lines[path] - 1], (name, path)


def paths(table: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}.")


VALUES = st.sampled_from(
    [
        *("1", "-2.5e-3", "true", "1979-05-27"),
        *('"[x] = 3 # y"', "'it\"s'", '"\\\\"', '""', '"""a\n# b = 1\n"""', "'''\n[t]\nk = \"\n'''"),
        *("[1, 2]", '[\n  "]", # ]\n  [3],\n]', "{ p = 1, q = '}' }"),
    ]
)
NAMES = st.sampled_from(["a", "b-c", "D_4", "7"])


@given(
    st.lists(st.tuples(st.lists(st.tuples(NAMES, VALUES), max_size=4, unique_by=lambda pair: pair[0]), NAMES))
)
def test_agrees_with_the_text_it_was_made_from(tables: list[tuple[list[tuple[str, str]], str]]) -> None:
    text, expected = "", {}
    for number, (items, name) in enumerate(tables):
        table = f"t{number}.{name}"
        expected[table] = text.count("\n") + 1
        text += f"[{table}]\n"
        for key, value in items:
            expected[f"{table}.{key}"] = text.count("\n") + 1
            text += f"{key} = {value} # = [\n\n"
    tomllib.loads(text)
    found = key_lines(text)
    assert {path: line for path, line in found.items() if "." in path} == expected
