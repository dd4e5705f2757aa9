"""The groups a leash holds when the launcher is gone; a leash run by hand, its parent this test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from fourfold.launch import leash
from tests.launch.procs import lives, wait_until_gone


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    started = [subprocess.Popen(command, start_new_session=True) for _ in range(3)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def told(text: str) -> None:
    subprocess.run([sys.executable, "-I", "-S", leash.__file__], input=text.encode(), check=True)


def test_what_was_let_go_is_spared_and_what_came_again_is_not(sleepers):
    one, two, three = (process.pid for process in sleepers)
    told(f"{one}\n{two}\n{three}\n-{one}\n-{three}\n{three}\n")
    wait_until_gone(two, three)
    assert lives(one)


def test_done_ends_it_quietly(sleepers):
    told("".join(f"{process.pid}\n" for process in sleepers) + "done\n")
    assert all(lives(process.pid) for process in sleepers)
