"""The batch script of docs/signals.md, with stand-ins for what it calls."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.procs import read_when_there

PAGE = Path(__file__).parents[2] / "docs" / "signals.md"
RUN = """#!{python}
import os, signal, sys, time
told = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: told.append(number))
with open("asked.tmp", "w") as file:
    print(os.getpid(), *sys.argv[1:], file=file)
os.rename("asked.tmp", "asked")
while not told and not os.path.exists("end"):
    time.sleep(0.01)
time.sleep(0.3)  # a save
with open("told", "w") as file:
    print(*told, file=file)
sys.exit(75 if told else int(open("end").read()))
"""


@pytest.fixture
def batch(tmp_path):
    """The script in a folder of its own, with `fourfold` and `scontrol` beside it."""
    text = next(
        block for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S) if "#SBATCH" in block
    )
    for name, lines in (
        ("job", text),
        ("fourfold", RUN.format(python=sys.executable)),
        ("scontrol", '#!/bin/sh\necho "$@" > queued\n'),
    ):
        (tmp_path / name).write_text(lines)
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    return subprocess.Popen(["bash", "job"], cwd=tmp_path, env=env)


def test_before_the_limit_it_stops_and_is_queued_again(tmp_path, batch):
    _, *words = read_when_there(tmp_path / "asked").split()
    assert words[:2] == ["train", "my.toml"]
    assert "auto" in words
    batch.send_signal(signal.SIGUSR1)
    assert batch.wait(20) == 75
    assert (tmp_path / "queued").read_text() == "requeue 17\n"
    assert (tmp_path / "told").read_text() == f"{signal.SIGUSR1:d}\n"


def test_told_again_it_waits_again(tmp_path, batch):
    read_when_there(tmp_path / "asked")
    for _ in range(3):
        batch.send_signal(signal.SIGUSR1)
        time.sleep(0.05)
    assert batch.wait(20) == 75
    assert (tmp_path / "queued").exists()


def test_cancelled_it_saves_and_stays_away(tmp_path, batch):
    read_when_there(tmp_path / "asked")
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(20) == 75
    assert not (tmp_path / "queued").exists()


@pytest.mark.parametrize("code", [0, 1, 137])
def test_any_other_end_is_the_jobs(tmp_path, batch, code):
    read_when_there(tmp_path / "asked")
    (tmp_path / "end.tmp").write_text(str(code))
    os.rename(tmp_path / "end.tmp", tmp_path / "end")
    assert batch.wait(20) == code
    assert not (tmp_path / "queued").exists()
