from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.spec.errors import DataError
from fourfold.train.story import Story


def test_rank_0_speaks_to_stderr_and_to_the_log(tmp_path, capsys):
    story = Story(tmp_path / "log.txt", speaks=True)
    story.say("one")
    story.progress("step 1")
    story.progress_if_silent("step 2")
    story.close()
    assert (tmp_path / "log.txt").read_text() == "one\nstep 1\n"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "one\nstep 1\n"


def test_other_ranks_are_silent(tmp_path, capsys):
    story = Story(tmp_path / "log.txt", speaks=False)
    story.say("one")
    story.progress("two")
    story.progress_if_silent("three")
    story.close()
    assert not (tmp_path / "log.txt").exists()
    assert capsys.readouterr().err == ""


def test_a_line_comes_after_thirty_silent_seconds(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("fourfold.train.story.time.monotonic", lambda: now)
    story = Story(tmp_path / "log.txt", speaks=True)
    now = 29.0
    story.progress_if_silent("too early")
    now = 31.0
    story.progress_if_silent("due")
    story.progress_if_silent("again too early")
    story.close()
    assert (tmp_path / "log.txt").read_text() == "due\n"


def test_a_long_line_is_the_same_lines_on_the_screen_and_in_the_log(tmp_path, capsys):
    story = Story(tmp_path / "log.txt", speaks=True)
    story.say("note: " + "some words " * 20)
    story.progress("step 1/2  saved " + "a/long/path" * 9)
    story.close()
    text = (tmp_path / "log.txt").read_text()
    assert text == capsys.readouterr().err
    assert [len(line) > 80 for line in text.splitlines()] == [False] * 3 + [False, True]


def test_a_disk_without_room_costs_lines_of_the_story_or_ends_the_run():
    lost = Story(Path("/dev/full"), speaks=True, may_lose=True)
    for _ in range(2000):
        lost.say("a line")
    lost.close()
    kept = Story(Path("/dev/full"), speaks=True)
    with pytest.raises(DataError, match="write a line of the story"):
        kept.say("a line")
    kept.close()
