from __future__ import annotations

import os
import subprocess
import sys

from fourfold.record.aloud import folded, say, say_and_keep

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
CODE = "from fourfold.record.aloud import say\nfor _ in range(3): say('a text')\nraise SystemExit(75)"


def test_it_is_said_on_stderr_at_once(capfd):
    say("a text")
    say("more", end="")
    assert capfd.readouterr() == ("", "a text\nmore")


def test_where_nobody_listens_it_is_silence_and_the_exit_code_stays():
    process = subprocess.Popen([sys.executable, "-c", CODE], stderr=subprocess.PIPE, env=BUFFERED)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait() == 75


def test_a_full_disk_is_silence_too():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", CODE], stderr=full, env=BUFFERED, check=False)
    assert done.returncode == 75


def test_a_stderr_that_is_no_file_is_left_alone(monkeypatch):
    tried = []

    class Broken:
        def write(self, text: str) -> int:
            tried.append(text)
            raise BrokenPipeError

        def flush(self) -> None: ...

        def fileno(self) -> int:
            raise ValueError

    monkeypatch.setattr(sys, "stderr", broken := Broken())
    say("a text")
    assert tried == ["a text"]
    assert sys.stderr is broken


def test_a_long_line_is_broken_between_words_and_goes_on_indented(tmp_path, capfd):
    path = "/a" * 60
    error = "  type:  " + "a command to copy, " * 5
    text = f"note: {'some words ' * 9}of {path} and-so-on, {'x' * 70}\nshort\n\n{error}"
    lines = folded(text).split("\n")
    assert all(len(line) <= 80 or line in (f"  {path}", error) for line in lines)
    assert lines[-3:] == ["short", "", error]
    assert all(line.startswith("  ") for line in lines[1:-3])
    assert " ".join(folded(text).split()) == " ".join(text.split())
    assert folded("y" * 80) == "y" * 80
    say_and_keep(text, tmp_path / "log.txt")
    say_and_keep("more", tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == capfd.readouterr().err == folded(text) + "\nmore\n"
    say_and_keep("said all the same", tmp_path / "nowhere" / "log.txt")
    assert capfd.readouterr().err == "said all the same\n"
