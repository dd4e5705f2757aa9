"""Where each rank is, readable from outside even when the rank is dead or stuck.

A pulse is a file of 56 bytes that its rank keeps mapped into memory; a beat is one store into it, about a
microsecond, no system call. The launcher reads it to say where a rank was killed or hung, and to see a stall.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fourfold.record.problems import unwritable

_RECORD = struct.Struct("<qqd?31s")  # beats so far, step, time, patient, phase
START = "start"  # the phase before the first beat


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading of a pulse. beats: how many so far; step: from 1, 0 = before the first; time: unix seconds."""

    beats: int
    step: int
    phase: str
    time: float
    patient: bool


class Pulse:
    """This rank's own pulse, kept in `<directory>/rank<r>`."""

    def __init__(self, directory: Path | str, rank: int) -> None:
        """Make the file and the directory. DataError if that cannot be done (disk full, no permission)."""
        path = Path(directory) / f"rank{rank}"
        self.step = 0
        self.phase = START
        self.beats = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Real bytes, not a hole: a store into a mapped hole on a full disk is a bus error.
            path.write_bytes(_RECORD.pack(0, 0, time.time(), True, START.encode()))
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        except OSError as error:
            raise unwritable(path, error, "keep a rank's pulse", "nothing was lost") from error

    def beat(self, step: int, phase: str, patient: bool = False) -> None:
        """Say where this rank is now: step from 1, phase of at most 31 ASCII letters.

        patient: this phase may honestly last long without another beat (opening data, compiling, writing a
        report); as long as any rank is in such a phase the launcher does not call the group stalled.
        """
        self.step = step
        self.phase = phase
        self.beats += 1
        _RECORD.pack_into(self._memory, 0, self.beats, step, time.time(), patient, phase.encode())

    def close(self) -> None:
        """Unmap the file; the last beat stays readable in it."""
        self._memory.close()


def read_pulses(directory: Path | str) -> dict[int, Beat]:
    """The last beat of every rank that has a pulse in this directory; files that are none are passed over."""
    found: dict[int, Beat] = {}
    for path in Path(directory).glob("rank*"):
        with suppress(OSError, ValueError, struct.error):
            beats, step, moment, patient, phase = _RECORD.unpack(path.read_bytes())
            text = phase.rstrip(b"\0").decode(errors="replace")
            found[int(path.name.removeprefix("rank"))] = Beat(beats, step, text, moment, patient)
    return found


def clear_ranks(directory: Path | str) -> None:
    """Remove the files of an earlier start's ranks, so that none can be taken for a living rank's."""
    for path in Path(directory).glob("rank*"):
        with suppress(OSError):
            os.unlink(path)
