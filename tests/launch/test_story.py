from __future__ import annotations

from fourfold.launch.failure import FailureReport
from fourfold.launch.story import in_file, last_lines, on_screen

KILLED = FailureReport(
    rank=1,
    kind="killed",
    step=5,
    phase="forward",
    message="",
    exit_code=137,
    time=2.0,
    evidence="logs/rank1.txt",
)
LOST = FailureReport(
    rank=0,
    kind="collective",
    step=5,
    phase="backward",
    message="RuntimeError: closed\nmore",
    exit_code=1,
    time=1.0,
    traceback="Traceback\n  line\n",
)


def test_on_the_screen_the_cause_is_last_and_consequences_take_one_line():
    lines = on_screen([KILLED, LOST]).splitlines()
    assert lines[0] == "rank 0 could not go on at step 5 (backward): RuntimeError: closed"
    assert lines[2] == "rank 1 was killed by SIGKILL at step 5 (forward)"
    assert "  file:  logs/rank1.txt" in lines
    assert "dmesg" in lines[-1]


def test_in_the_file_the_cause_is_first():
    text = in_file([KILLED, LOST], ("python", "x.py"), 2)
    assert text.startswith("# Failed: 2 ranks of `python x.py`\n")
    assert text.index("rank 1 was killed") < text.index("## After it") < text.index("Traceback")
    assert "## After it" not in in_file([KILLED], ("x",), 1)
    assert in_file([KILLED], ("x",), 1, attempt=2).startswith("# Failed: 1 rank of `x` (attempt 2)\n")


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 50_000 + b"\none\n\xfftwo\n")
    assert last_lines(log, 2) == "one\n�two"
    assert last_lines(log, since=50_001) == "one\n�two"
    assert last_lines(log, since=50_005) == "�two"
    assert last_lines(log, since=log.stat().st_size) == ""
    assert last_lines(tmp_path / "missing") == ""
