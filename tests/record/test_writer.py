from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.record.reader import RunReader, read_lines
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines, dumps, write_json, write_request, write_text
from fourfold.spec.errors import DataError
from fourfold.spec.model import MlpSpec
from fourfold.spec.spec import Spec


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: the system refuses the rest of a write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def no_permission(folder: Path) -> Iterator[None]:
    """Nothing may be made in `folder`, for root neither."""
    folder.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


def four_parts(error: DataError) -> tuple[str, str, str, str]:
    (problem,) = error.problems
    assert error.exit_code == 5
    assert problem.asked
    assert problem.found
    assert problem.why
    assert problem.instead
    return problem.asked, problem.found, problem.why, problem.instead


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1 / step, "ids": [step, -1]} for step in range(1, 4)]
    with JsonLines(tmp_path / "events" / "rank0.jsonl") as file:
        for line in lines:
            file.write(line)
        # Before closing: nothing waits in a buffer.
        assert list(read_lines(file.path)) == lines


def test_two_writers_one_after_the_other_append(tmp_path: Path) -> None:
    for step in (1, 2):
        with JsonLines(tmp_path / "m.jsonl") as file:
            file.write({"step": step})
    assert [line["step"] for line in read_lines(tmp_path / "m.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("tail", "kept"),
    [(b"", [1, 2]), (b'{"step": 3, "lo', [1, 2]), (b'{"step": 3}', [1, 2, 3]), (b"\0" * 100, [1, 2])],
)
def test_a_tail_left_by_a_death_is_mended_before_appending(
    tmp_path: Path, tail: bytes, kept: list[int]
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    with JsonLines(path) as file:
        file.write({"step": 9})
    assert [line["step"] for line in read_lines(path)] == [*kept, 9]


def test_a_tail_longer_than_one_block_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"text": "' + b"x" * 200_000)
    with JsonLines(path) as file:
        file.write({"step": 9})
    assert [line["step"] for line in read_lines(path)] == [1, 9]


def test_numbers_that_are_not_finite_are_strings_in_strict_json(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "m.jsonl") as file:
        file.write({"loss": float("nan"), "norms": (float("inf"), {"low": float("-inf")}), "lr": 0.5})
    (line,) = read_lines(tmp_path / "m.jsonl")
    assert line == {"loss": "nan", "norms": ["inf", {"low": "-inf"}], "lr": 0.5}
    assert float(line["loss"]) != float(line["loss"])


def test_a_value_without_json_form_is_our_bug() -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        dumps({"x": object()})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_a_data_error_in_four_parts() -> None:
    file = JsonLines("/dev/full")
    with pytest.raises(DataError) as caught:
        file.write({"step": 1})
    asked, found, why, instead = four_parts(caught.value)
    assert asked == "write line 1: /dev/full"
    assert found == os.strerror(errno.ENOSPC)
    assert "every line before this one (0 of this process) is whole" in why
    assert "df -h" in instead


def test_a_disk_that_fills_inside_a_line_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    line = {"step": 0, "text": "x" * 400}
    with JsonLines(path) as file:
        file.write(line)
        file.write({**line, "step": 1})
        with largest_file(1000), pytest.raises(DataError) as caught:
            file.write({**line, "step": 2})
        asked, found, why, _ = four_parts(caught.value)
        assert str(path) in asked
        assert found == os.strerror(errno.EFBIG)
        assert "(2 of this process)" in why
        assert path.read_bytes().endswith(b"}\n")
        assert [entry["step"] for entry in read_lines(path)] == [0, 1]
        file.write({"step": 9})  # room again: the same file goes on
    assert [entry["step"] for entry in read_lines(path)] == [0, 1, 9]


def test_a_document_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"steps": 4})
    write_json(path, {"steps": 5})
    assert os.listdir(tmp_path) == ["plan.json"]
    with largest_file(1000), pytest.raises(DataError) as caught:
        write_json(path, {"steps": 6, "text": "x" * 4000})
    asked, _, why, _ = four_parts(caught.value)
    assert str(path) in asked
    assert "the earlier file of that name is untouched" in why
    assert json.loads(path.read_text()) == {"steps": 5}
    assert os.listdir(tmp_path) == ["plan.json"]


def test_no_permission_is_a_data_error_naming_the_file(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    with no_permission(room):
        with pytest.raises(DataError) as lines:
            JsonLines(room / "m.jsonl")
        with pytest.raises(DataError) as document:
            write_json(room / "plan.json", {})
    for caught, name in ((lines, "m.jsonl"), (document, "plan.json")):
        asked, found, _, instead = four_parts(caught.value)
        assert name in asked
        assert found == os.strerror(errno.EACCES)
        assert "ls -ld" in instead


def test_a_folder_that_is_a_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("")
    with pytest.raises(DataError, match=r"events/rank0\.jsonl"):
        JsonLines(tmp_path / "events" / "rank0.jsonl")
    with pytest.raises(DataError, match=r"events/x\.json"):
        write_text(tmp_path / "events" / "x.json", "")


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    program = (
        "import os, signal, sys\n"
        "from fourfold.record.writer import JsonLines\n"
        "file = JsonLines(sys.argv[1])\n"
        "for step in range(50): file.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in read_lines(path)] == list(range(50))


def test_the_request_is_kept_verbatim_and_resolved(tmp_path: Path) -> None:
    spec = Spec(name="toy", model=MlpSpec(kind="mlp"))
    text = "# ü\nname = 'toy'\r\n"
    write_request(RunDir(tmp_path), spec, {"model.kind": "toy.toml:2"}, text)
    assert (tmp_path / "spec.toml").read_bytes() == text.encode()
    reader = RunReader(tmp_path)
    assert reader.spec() == spec
    assert reader.provenance() == {"model.kind": "toy.toml:2"}


def test_lines_are_put_on_disk_when_asked(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_ino))
    with JsonLines(tmp_path / "x.jsonl") as lines:
        lines.write({"step": 1})
        lines.flush()
    assert flushed == [(tmp_path / "x.jsonl").stat().st_ino, tmp_path.stat().st_ino]


def test_lines_without_room_wait_and_come_first_when_there_is_some(tmp_path, capfd):
    path = tmp_path / "m.jsonl"
    with JsonLines(path, hold_bytes=2000) as file:
        for step in range(9):
            with largest_file(1000 if 2 <= step < 6 else 10**6):
                file.write({"step": step, "text": "x" * 400})
                if 2 <= step < 6:
                    with pytest.raises(DataError):
                        file.flush()
            whole = step + 1 if not 2 <= step < 6 else 2
            assert [line["step"] for line in read_lines(path)] == list(range(whole))
    told = " ".join(capfd.readouterr().err.split())
    assert told.count("note: no room for") == 1 and str(path) in told


def test_more_lines_without_room_than_are_held_are_an_error_and_so_is_an_end_without(tmp_path):
    file = JsonLines("/dev/full", hold_bytes=2**10)
    for _ in range(2):
        file.write({"text": "x" * 480})
    with pytest.raises(DataError, match="No space left"):
        file.write({"text": "x" * 480})
    with pytest.raises(DataError, match="No space left"):
        file.close()
    broken = JsonLines(tmp_path / "x.jsonl", hold_bytes=2**10)
    os.close(broken._file)
    with pytest.raises(DataError, match="Bad file descriptor"):  # no want of room
        broken.write({"step": 1})
