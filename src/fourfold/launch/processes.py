"""The processes of the ranks on this machine: started, watched and ended, with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fourfold.launch import leash
from fourfold.launch.stop import held

LAUNCHER = "FOURFOLD_LAUNCHER"  # the process that starts a rank, by its number
_REAP_S = 5.0  # a killed process that is still there after this is stuck in the kernel, beyond our reach


class RankProcess:
    """One rank's process, leader of a session and process group of its own, so that all it starts ends with it."""

    def __init__(
        self, rank: int, command: Sequence[str], env: Mapping[str, str], log: Path | None, holds: bool = False
    ) -> None:
        """Start it. log: where stdout and stderr go, appended; None: they pass through. OSError if it cannot start.

        holds: the stop signals are held back in it until its `StopRequest` takes them, so that none is lost, or ends
        it, while it imports; a program without one never gets them.
        """
        self.rank = rank
        self.log = log
        self.ended_at: float | None = None  # unix seconds
        output = None if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.log_start = 0 if output is None else os.fstat(output).st_size  # what is before it, others wrote
        try:
            with held() if holds else nullcontext():
                self._process = subprocess.Popen(
                    command,
                    env={**env, LAUNCHER: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        finally:
            if output is not None:
                os.close(output)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit code, -n if signal n ended it, None while it lives. What it leaves behind is killed with it."""
        code = self._process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.time()
            self._kill_group()  # now: later the number may be another group's
        return code

    def send(self, number: int) -> None:
        """A signal for the rank alone, not for what it started: a loader must outlive the rank's last step."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS: no permission to kill what is dead
            os.killpg(self.pid, signal.SIGKILL)

    @staticmethod
    def kill_all(processes: Sequence[RankProcess]) -> None:
        """Kill those that live, with all that they started; returns when they are gone."""
        living = [process for process in processes if process.poll() is None]
        for process in living:
            process._kill_group()
        for process in living:
            with suppress(subprocess.TimeoutExpired):
                process._process.wait(_REAP_S)


class Leash:
    """Context manager: the groups it holds die when this process is gone, even by SIGKILL."""

    def __enter__(self) -> Self:
        with held():  # a signal for every process there is must not end it while it starts
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", leash.__file__],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # else it would keep the other end of the launcher's pipes open
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self

    def hold(self, process: RankProcess) -> None:
        """Take this one, too. A leash that is itself gone holds nothing; the ranks go on."""
        self._say(f"{process.pid}\n")

    def let_go(self, process: RankProcess) -> None:
        """This one has ended, with all that it started: its number may become another's."""
        self._say(f"-{process.pid}\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say("done\n")
        with suppress(OSError):
            self._pipe.close()
        self._process.wait()

    @property
    def _pipe(self) -> IO[bytes]:
        pipe = self._process.stdin
        assert pipe is not None
        return pipe

    def _say(self, text: str) -> None:
        with suppress(OSError):
            self._pipe.write(text.encode())
