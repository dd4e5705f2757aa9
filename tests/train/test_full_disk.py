"""A disk that is full, and a folder that may not be written: real processes, and a real disk where that can be had."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fourfold.checkpoint.choose import newest_valid
from fourfold.checkpoint.validate import validate
from fourfold.record.run_dir import RunDir
from tests.cli.test_train import command, events, finish
from tests.forbidden import forbidden
from tests.train.saver_jobs import checkpoints

# A checkpoint of 1.2 MiB, and steps that can be met in the middle.
SETS = (
    'data.transforms=[{kind="import", target="tests.train.rank_jobs:slowly"}]',
    *("model.hidden=128", "run.steps=12", "checkpoint.every=2", "checkpoint.keep_last=99"),
)
FULL = "No space left on device"


def go(run: Path, *words: str, sets: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    asked = command(*words, sets=(f"run.dir={json.dumps(str(run))}", *SETS, *sets))
    return subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < until
        time.sleep(0.01)


def did(run: Path, kind: str, step: int) -> bool:
    """Whether both ranks have an event of that kind and step, or later."""
    if not all(RunDir(run).events(rank).exists() for rank in (0, 1)):
        return False
    return all(
        any(e["kind"] == kind and int(str(e["step"])) >= step for e in events(run, rank)) for rank in (0, 1)
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if (
        not mount
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=8m", "none", str(place)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("a disk of its own takes root's rights")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves room for the record, and not for a checkpoint."""
    size = shutil.disk_usage(disk).free - 2**19
    filler = disk / "filler"
    filler.write_bytes(bytes(size))
    return filler


def test_a_run_ends_when_the_disk_is_full_and_goes_on_when_there_is_room(disk):
    run = disk / "run"
    process = go(run)
    wait_for(process, lambda: did(run, "saved", 2))
    filler = fill(disk)
    code, story = finish(process)
    assert code == 5, story
    assert FULL in story and "df -h" in story and "the run ends without a checkpoint of step" in story
    kept = newest_valid(RunDir(run).checkpoints)
    assert kept.path is not None and kept.passed_over == ()
    assert checkpoints(run)[-1] == kept.step
    filler.unlink()
    code, story = finish(go(run, "--resume", "must", sets=("checkpoint.keep_last=2",)))
    assert code == 0, story
    assert checkpoints(run) == [10, 12]


@pytest.mark.long
def test_a_run_may_go_on_while_the_disk_is_full(disk):
    run = disk / "run"
    process = go(run, sets=('checkpoint.on_error="go_on"', "checkpoint.keep_last=1"))
    wait_for(process, lambda: did(run, "saved", 2))
    filler = fill(disk)
    wait_for(process, lambda: did(run, "not_saved", 2))
    filler.unlink()
    code, story = finish(process)
    assert code == 0, story
    assert "not saved, and the run goes on" in story and FULL in story
    assert checkpoints(run) == [12]


@pytest.mark.long
def test_a_signal_on_a_full_disk_does_not_end_in_75(disk):
    run = disk / "run"
    process = go(run, sets=("checkpoint.every=0", 'checkpoint.on_error="go_on"'))
    wait_for(process, lambda: did(run, "step", 2))
    fill(disk)
    process.send_signal(signal.SIGTERM)
    code, story = finish(process)
    assert code == 5, story
    assert FULL in story and "the run ends without a checkpoint of step" in story
    assert list(RunDir(run).checkpoints.iterdir()) == []


@pytest.mark.long
def test_a_folder_that_may_not_be_written_is_told_in_mid_run_and_at_the_door(tmp_path):
    run = tmp_path / "run"
    place = RunDir(run).checkpoints
    process = go(run)
    wait_for(process, lambda: did(run, "saved", 2))
    with forbidden(place):
        code, story = finish(process)
        assert code == 5, story
        assert "ls -ld" in story and ("not permitted" in story or "denied" in story)
        kept = newest_valid(place)
        assert kept.path is not None and validate(kept.path) == []
        before = len(events(run, 0))
        code, story = finish(go(run, "--resume", "must"))
        assert code == 5, story
        assert "keep checkpoints" in story and "ls -ld" in story
        assert len(events(run, 0)) == before  # no rank was started
    code, story = finish(go(run, "--resume", "must"))
    assert code == 0, story
    assert checkpoints(run)[-1] == 12


def test_a_run_that_may_not_make_its_directory_is_told_before_a_rank_starts(tmp_path):
    with forbidden(tmp_path):
        code, story = finish(go(tmp_path / "run"))
    assert code == 5, story
    assert "make the run directory" in story and "ls -ld" in story
    assert list(tmp_path.iterdir()) == []
