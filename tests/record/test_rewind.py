from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.record.reader import read_lines
from fourfold.record.rewind import START, Mark, Marker, keep_lines_until, set_findings_aside
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines
from fourfold.spec.errors import DataError


def test_lines_of_later_steps_are_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        for step in (1, 2, 2, 3, 4):
            lines.write({"step": step, "loss": float("nan") if step == 2 else 1.5})
        lines.write({"note": "of no step"})
    keep_lines_until(path, 2)
    assert [line.get("step") for line in read_lines(path)] == [1, 2, 2, None]
    assert [line.get("loss") for line in read_lines(path)] == [1.5, "nan", "nan", None]


def test_nothing_there_and_nothing_later_are_left_as_they_are(tmp_path):
    keep_lines_until(tmp_path / "none.jsonl", 3)
    assert not list(tmp_path.iterdir())
    with JsonLines(tmp_path / "metrics.jsonl") as lines:
        lines.write({"step": 3})
    keep_lines_until(tmp_path / "metrics.jsonl", 3)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [3]


def test_a_file_is_cut_back_to_its_mark_and_grows_on_from_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"step": 1})
        marker = Marker(path)
        first = marker.mark()
        lines.write({"step": 2})
        second = marker.mark()
        lines.write({"step": 3})
    assert [first.lines, second.lines] == [1, 2]
    assert Marker(path).mark().lines == 3
    later = Marker(path)
    with JsonLines(path) as lines:
        assert later.cut_back(second)
        assert [line["step"] for line in read_lines(path)] == [1, 2]
        lines.write({"step": "three"})
        assert later.mark() == Marker(path).mark()
    assert Marker(path).cut_back(first)
    assert [line["step"] for line in read_lines(path)] == [1]
    assert Marker(path).cut_back(START)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("harm", ["another", "shorter", "swapped"])
def test_another_file_is_not_cut(tmp_path, harm):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{1}\n{2}\n{3}\n")
    mark = Marker(path).mark()
    data = {"another": b"{1}\n{4}\n{3}\n{5}\n", "shorter": b"{1}\n{2}\n", "swapped": b"{2}\n{1}\n{3}\n"}[harm]
    path.write_bytes(data)
    with pytest.raises(DataError, match="with the 3 lines") as caught:
        Marker(path).cut_back(mark)
    assert f"mv {path}" in caught.value.problems[0].instead
    assert path.read_bytes() == data


def test_nothing_there_is_told_and_a_file_that_cannot_be_flushed_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    mark = Mark(lines=1, bytes=4, xxh3_128="0" * 32)
    assert not Marker(path).cut_back(mark)
    path.touch()
    marker = Marker(path)
    assert not marker.cut_back(mark)
    assert marker.mark() == START

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        marker.mark()
    with pytest.raises(DataError, match="flush the record"):
        Marker(tmp_path / "none").mark()


@given(
    st.lists(st.binary(min_size=1, max_size=5).filter(lambda line: b"\n" not in line), max_size=8), st.data()
)
def test_any_lines_any_marks(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: st.DataObject
):
    path: Path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    path.touch()
    marker, marks = Marker(path), [START]
    for line in lines:
        with path.open("ab") as file:
            file.write(line + b"\n")
        if data.draw(st.booleans()):
            marks.append(marker.mark())
    kept = data.draw(st.sampled_from(marks))
    assert Marker(path).cut_back(kept)
    assert path.read_bytes() == b"".join(line + b"\n" for line in lines[: kept.lines])


def test_findings_about_the_run_as_it_was_are_kept_apart(tmp_path):
    run = RunDir(tmp_path)
    set_findings_aside(run)
    assert not run.findings.exists()
    run.findings.mkdir()
    for text in ("first", "second"):
        (run.findings / "coverage.json").write_text(text)
        set_findings_aside(run)
    kept = sorted(run.findings.rglob("*.json"))
    assert [str(path.relative_to(run.findings)) for path in kept] == [
        "before-1/coverage.json",
        "before-2/coverage.json",
    ]
    assert [path.read_text() for path in kept] == ["first", "second"]
