from __future__ import annotations

import os
import subprocess
import sys

from fourfold.record.aloud import say

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
