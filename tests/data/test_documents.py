"""Readers of documents, and what they say of files that hold no text."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import pytest

from fourfold.data import documents
from fourfold.data.documents import Documents, jsonl, located, stdlib, text
from fourfold.spec.errors import DataError


def read(source: Documents) -> list[bytes]:
    return [b"".join(pieces) for pieces in source]


def problems(source: Documents) -> list[str]:
    with pytest.raises(DataError) as error:
        read(source)
    return [str(problem) for problem in error.value.problems]


def lines(tmp_path: Path, *values: object) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(value if isinstance(value, str) else json.dumps(value) + "\n" for value in values)
    )
    return str(path)


def test_the_standard_library_is_real_text_without_tests_or_packages() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    found = read(stdlib())
    assert sum(map(len, found)) > 5_000_000
    assert (root / "ast.py").read_bytes() in found
    assert (root / "json" / "decoder.py").read_bytes() in found
    assert Path(pytest.__file__).read_bytes() not in found
    assert not [document for document in found if b"\0" in document]


def test_the_standard_library_is_sorted_and_leaves_folders_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.py", "a/z.py", "a.py", "a/test/t.py", "site-packages/p.py", "idlelib/i.py", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert read(stdlib()) == [b"a.py", b"a/z.py", b"b.py"]


def test_a_python_without_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    (problem,) = problems(stdlib())
    assert str(tmp_path) in problem
    assert "data.kind=text" in problem


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes("Grüße\r\n\n€".encode())
    assert read(text(str(path))) == [path.read_bytes()]


def test_text_files_of_a_folder_are_documents_by_path(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "other.md"):
        (tmp_path / name).write_text(name)
    assert read(text(str(tmp_path))) == [b"a.txt", b"b.txt", b"deep/c.txt"]


@pytest.mark.parametrize("piece", [1, 2, 3, 1 << 20])
def test_characters_cut_by_a_piece_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(documents, "_PIECE", piece)
    path = tmp_path / "cut.txt"
    path.write_bytes("aé€𝄞".encode() * 3)
    assert read(text(str(path))) == [path.read_bytes()]


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("content", "place", "what"),
    [
        (b"ab\ncd\xff", "byte 5, line 2", "not UTF-8"),
        (b"a\n\xe2\x82", "byte 2, line 2", "not UTF-8"),  # a character without its end
        (b"\n\n\0\xff", "byte 2, line 3", "NUL"),
        (b"a\xffb\0", "byte 1, line 1", "not UTF-8"),
        (b"\xe2\x82\0", "byte 0, line 1", "not UTF-8"),
    ],
)
def test_what_is_no_text_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, content: bytes, place: str, what: str
) -> None:
    monkeypatch.setattr(documents, "_PIECE", piece)
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    (problem,) = problems(text(str(path)))
    assert str(path) in problem
    assert place in problem
    assert what in problem


def test_all_bad_files_of_a_folder_come_at_once_up_to_twenty(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_bytes(b"fine" if number % 2 else b"\xff")
    assert len(problems(text(str(tmp_path)))) == 15
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_bytes(b"\xff")
    assert len(problems(text(str(tmp_path)))) == 20


def test_json_lines_are_documents_in_the_named_field(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "one"}, "\n", {"n": 1, "text": "zwö\n"}, {"text": ""})
    assert read(jsonl(path, "text")) == [b"one", "zwö\n".encode(), b""]


def test_a_byte_order_mark_before_the_first_line_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read(jsonl(str(path), "text")) == [b"a"]


def test_every_bad_line_is_named_with_its_number(tmp_path: Path) -> None:
    bad = [
        "{not json}\n",
        "\n",
        "[1]\n",
        {"txet": "typo", "id": 3},
        {"text": 5},
        {"text": None},
        {"text": "a\0b"},
        '{"text": "\\ud800"}\n',
        {},
    ]
    path = lines(tmp_path, {"text": "fine"}, *bad, {"text": "fine"})
    found = problems(jsonl(path, "text"))
    numbers = [int(problem.removeprefix(path + ":").split(":")[0]) for problem in found]
    assert numbers == [2, 4, 5, 6, 7, 8, 9, 10]
    said = ["no JSON", "a JSON list", "data.field=txet", "a number", "a null", "NUL", "surrogate", "(none)"]
    for words, problem in zip(said, found, strict=True):
        assert words in problem


def test_undecodable_bytes_in_a_line_are_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    (problem,) = problems(jsonl(str(path), "text"))
    assert f"{path}:2" in problem
    assert "byte 10" in problem


def test_no_more_than_twenty_bad_lines_are_told(tmp_path: Path) -> None:
    written = [f"[{number}]\n" if number % 2 else "nonsense\n" for number in range(50)]
    found = problems(jsonl(lines(tmp_path, *written), "text"))
    assert len(found) == 2
    assert "lines 3, 5, 7, 9, 11, 13, 15, 17, 19, and the lines after it were not read" in found[0]
    assert "lines 4, 6, 8, 10, 12, 14, 16, 18, 20, and" in found[1]


def test_the_same_fault_in_many_lines_is_told_once(tmp_path: Path) -> None:
    (problem,) = problems(jsonl(lines(tmp_path, *['{"txt": "a"}\n'] * 3, '{"text": "b"}\n'), "text"))
    assert ":1 (and lines 2, 3):" in problem


def test_a_deeply_nested_line_is_a_bad_line(tmp_path: Path) -> None:
    deep = sys.getrecursionlimit() * 50
    (problem,) = problems(jsonl(lines(tmp_path, "[" * deep + "]" * deep + "\n"), "text"))
    assert "no JSON" in problem


def test_a_missing_file_comes_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("x")
    (problem,) = problems(text(str(tmp_path / "trian.txt")))
    assert "no such file" in problem
    assert str(tmp_path / "train.txt") in problem


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nor the folder"):
        located(str(tmp_path / "no" / "file.txt"), "text")


def test_a_folder_without_text_says_what_it_has(tmp_path: Path) -> None:
    (problem,) = problems(text(str(tmp_path)))
    assert "the folder is empty" in problem
    (tmp_path / "a.md").write_text("x")
    (problem,) = problems(text(str(tmp_path)))
    assert ".md" in problem


def test_a_folder_is_no_json_lines(tmp_path: Path) -> None:
    (problem,) = problems(jsonl(str(tmp_path), "text"))
    assert "directory" in problem


def test_the_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("home")
    assert read(text("~/a.txt")) == [b"home"]
