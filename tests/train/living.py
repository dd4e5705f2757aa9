"""A living run, seen from outside: its processes, where its ranks are, what it has saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fourfold.checkpoint.choose import newest_valid
from fourfold.checkpoint.validate import read_manifest
from fourfold.launch.pulse import read_pulses
from fourfold.record.run_dir import RunDir
from tests.cli.test_train import events
from tests.launch.procs import lives


def descendants(pid: int) -> list[int]:
    """All processes below this one, parents first."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def words_of(pid: int) -> str:
    """The command line of a process; nothing if it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def ranks_of(launcher: int) -> list[int]:
    return [pid for pid in descendants(launcher) if "fourfold.train.rank" in words_of(pid)]


def workers_of(pid: int) -> list[int]:
    return [child for child in descendants(pid) if "fourfold.data.worker" in words_of(child)]


def tell(pids: Iterable[int], *numbers: int) -> None:
    """Each of the signals to each process that still lives."""
    for pid in pids:
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def phases(run: Path) -> dict[int, tuple[int, str]]:
    """Step and phase of each rank that has a pulse."""
    return {rank: (beat.step, beat.phase) for rank, beat in read_pulses(run / "pulse").items()}


def newest_step(run: Path) -> int:
    """The step of the newest valid checkpoint, 0 if there is none."""
    path = newest_valid(RunDir(run).checkpoints).path
    return 0 if path is None else read_manifest(path).step


def last(run: Path, kind: str, rank: int = 0) -> dict[str, object] | None:
    """A rank's last event of a kind."""
    return next((event for event in reversed(events(run, rank)) if event["kind"] == kind), None)


def ended(
    process: subprocess.Popen[str], all_of_it: Iterable[int], within_s: float = 60.0
) -> tuple[int, str]:
    """Exit code and story of a launcher that is about to end; asserts that nothing of it is left."""
    _, story = process.communicate(timeout=within_s)
    until = time.monotonic() + 10
    while left := [f"{pid}: {words_of(pid)}" for pid in all_of_it if lives(pid)]:
        assert time.monotonic() < until, (left, story)
        time.sleep(0.01)
    return process.returncode, story


def torchrun(words: Iterable[str], *flags: str) -> subprocess.Popen[str]:
    """`torchrun FLAGS -m fourfold WORDS` on two ranks."""
    asked = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *flags]
    asked += ["-m", "fourfold", *words]
    return subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    """For a test that has failed: nothing of it stays."""
    if process.poll() is None:
        tell([*reversed(descendants(process.pid)), process.pid], signal.SIGKILL)
        process.communicate()
