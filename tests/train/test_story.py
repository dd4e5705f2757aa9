from __future__ import annotations

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
