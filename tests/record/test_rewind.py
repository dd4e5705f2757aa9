from __future__ import annotations

from fourfold.record.reader import read_lines
from fourfold.record.rewind import keep_lines_until
from fourfold.record.writer import JsonLines


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
