"""`fourfold data prepare` and `fourfold data show`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.data.corpus import open_jsonl, open_stdlib


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"body": f"text of document {n}\n" * 9}) + "\n" for n in range(100)))
    return path


def test_prepare_then_show(lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = lines.with_name("made.bin")
    assert main(["data", "prepare", str(lines), str(output), "--field", "body", "--json"]) == 0
    done = capsys.readouterr()
    document = json.loads(done.out)
    assert document["schema"] == "fourfold.data.prepare/1"
    assert document["path"] == str(output)
    assert document["header"]["content_hash"] == open_jsonl(str(lines), "body").content_hash
    assert f"next: fourfold train tiny --set data.kind=tokens --set data.path={output}" in done.err
    data = ["--set", "data.kind=tokens", "--set", f"data.path={output}"]
    assert main(["data", "show", "tiny", *data, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema"] == "fourfold.data/1"
    assert shown["content_hash"] == document["header"]["content_hash"]
    assert shown["train"]["documents"] + shown["validation"]["documents"] == 100
    assert shown["train"]["tokens"] + shown["validation"]["tokens"] == document["header"]["tokens"]
    assert shown["steps_per_epoch"] == shown["train"]["samples"] // 48


def test_a_folder_is_text_and_the_result_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("some text")
    assert main(["data", "prepare", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "1 document, 10 tokens, the longest document 10" in out
    assert "content hash" in out
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.json", "out.offsets"]


def test_an_existing_output_is_refused_without_naming_other_files(
    lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "prepare", str(lines), str(lines.with_suffix("")), "--field", "body"]
    assert main(command) == 0
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "not overwritten" in told
    assert f"rm {lines.with_suffix('.bin')}" in told
    assert str(lines) not in told.partition("rm ")[2]


def test_all_bad_lines_are_told_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"body": "a"}\n{"text": 1}\nnonsense\n')
    assert main(["data", "prepare", str(path), str(tmp_path / "out")]) == 5
    told = capsys.readouterr().err
    assert f"{path}:1" in told
    assert "--set data.field=body" in told
    assert f"{path}:2" in told
    assert f"{path}:3" in told
    assert "3 problems" in told
    assert [each.name for each in tmp_path.iterdir()] == ["bad.jsonl"]


def test_the_kind_may_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.log"
    path.write_text('{"text": "a"}\n')
    assert main(["data", "prepare", str(path), str(tmp_path / "out"), "--kind", "jsonl"]) == 0
    assert "1 document, 2 tokens" in capsys.readouterr().out


def test_show_fits_the_screen_and_names_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "tiny"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert open_stdlib().content_hash in out
    assert "global batch 48, last batch: drop" in out


def test_show_tells_notes_and_what_training_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short a text")
    assert main(["data", "show", "tiny", "--set", "data.kind=text", "--set", f"data.path={path}"]) == 0
    told = capsys.readouterr()
    assert "steps per epoch  0" in told.out
    assert "note: validation: none of 1 documents was drawn" in told.err
    assert "longer than any document" in told.err
    assert "fewer training samples than one global batch" in told.err
    assert "--set data.last_batch=keep" in told.err


def test_without_a_global_batch_steps_are_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[model]\nkind = "mlp"\n[data]\nkind = "synthetic"\nvalidation_fraction = 0.0\n')
    assert main(["data", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "n/a: batch.global_batch is not given" in out
    assert "none" in out
    assert main(["data", "show", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["validation"] is None
    assert document["steps_per_epoch"] is None


def test_missing_data_is_exit_code_five(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "tiny", "--set", "data.kind=text", "--set", "data.path=/no/such.txt"]) == 5
    assert "no such file" in capsys.readouterr().err


def test_neither_verb_needs_torch(lines: Path) -> None:
    code = (
        "import sys; from fourfold.cli.main import main; "
        "assert main(['data', 'show', 'tiny', '--json']) == 0; "
        "assert main(['data', 'prepare', sys.argv[1], sys.argv[2], '--field', 'body']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    arguments = [sys.executable, "-c", code, str(lines), str(lines.with_name("out"))]
    assert subprocess.run(arguments, capture_output=True, check=False).returncode == 0
