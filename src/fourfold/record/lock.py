"""One run directory, one run: a lock that names its owner and goes with its process, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fourfold.record.problems import unwritable
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import Problem, SpecError


@contextmanager
def locked(run: RunDir) -> Iterator[None]:
    """Hold the run directory for this process.

    The kernel lets go of the lock when the process ends; the file stays, and says who had it last.
    Raises SpecError naming the process that holds it, DataError if the file cannot be written.
    """
    path = run.path / "lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(path, error, "lock the run directory", "nothing was written") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SpecError(_held(run, os.pread(file, 4096, 0).decode(errors="replace"))) from error
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(owner).encode(), 0)
        yield
    finally:
        os.close(file)


def at_work(run: RunDir) -> bool:
    """Whether some process holds the run directory now; False where that cannot be told. Nothing is written."""
    return is_held(run.path / "lock", fcntl.LOCK_SH, unknown=False)


def is_held(path: Path | str, wanted: int, unknown: bool) -> bool:
    """Whether some process's lock on `path` (a file or a folder) stands in the way of `wanted` (LOCK_SH or LOCK_EX).

    unknown: the answer where it cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return unknown
    try:
        fcntl.flock(file, wanted | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _in_words(owner: str) -> str:
    """Who wrote the lock's file; whoever holds it may not have written it yet, or only in part."""
    try:
        told = json.loads(owner)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(told["since"]))
        return f"process {told['pid']} on {told['host']}, since {since}"
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return "it has not said which"


def _held(run: RunDir, owner: str) -> Problem:
    return Problem(
        asked=f"the run directory {run.path}",
        found=f"another run is at work in it: {_in_words(owner)}",
        why="two runs that write into one directory leave a record, and checkpoints, of neither",
        instead="wait for it, stop it, or another run.dir",
    )
