"""State that is kept elsewhere than on the device: on the CPU, or the optimizer's moments in mapped files.

A mapped file is read and written page by page, as the update goes through it: of moments on disk only what the system
keeps cached takes memory, and that it gives back when others need it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from fourfold.plan.state_bytes import ALIGNED_BYTES
from fourfold.record.problems import is_full
from fourfold.spec.errors import DataError, Problem
from fourfold.spec.training import LayoutSpec

SLOTS = ("exp_avg", "exp_avg_sq")  # AdamW's moments, each of the shape of what is updated
_PREFIX = "moments-rank"


def offload_policy(layout: LayoutSpec, device: torch.device) -> OffloadPolicy:
    """What FSDP2 is told: shards and their gradients on the CPU, where the device is another."""
    return CPUOffloadPolicy() if home(layout, device) != device else OffloadPolicy()


def home(layout: LayoutSpec, device: torch.device) -> torch.device:
    """Where a rank's own part of the parameters, and with it the moments, is kept."""
    return torch.device("cpu") if layout.offload == "cpu" else device


class MappedMoments:
    """Room for the moments of what one rank holds, as tensors on the CPU that lie in one file."""

    def __init__(self, held: Mapping[str, Tensor], reserve: Callable[[int], Tensor]) -> None:
        """held: what is updated, by name. reserve: gives so many bytes, as `mapped` does; all are asked for at once."""
        self._places: dict[tuple[str, str], tuple[int, Tensor]] = {}
        end = 0
        for name, tensor in held.items():
            for slot in SLOTS:
                self._places[name, slot] = end, tensor
                end += -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self.room = reserve(max(end, ALIGNED_BYTES))  # an empty file cannot be mapped

    def slots(self, name: str) -> dict[str, Tensor]:
        """The moments of one tensor, as they are: zeros where they were never written."""
        return {slot: self._slot(name, slot) for slot in SLOTS}

    def _slot(self, name: str, slot: str) -> Tensor:
        start, like = self._places[name, slot]
        part = self.room[start : start + like.nbytes]
        return part.view(like.dtype).view(like.shape)


def mapped(folder: Path, rank: int, size: int) -> Tensor:
    """`size` bytes of a new file in `folder`, which is made if its parent is there; what a killed run left there goes.

    All of it is reserved at once: a disk that has too little room says so here, not in mid-run. The file has no name
    any more as soon as it is mapped: the system takes it back when the process ends, however it ends.
    Raises DataError where the folder or the room is not to be had.
    """
    path = folder / f"{_PREFIX}{rank}-{os.getpid()}"
    try:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)  # not its parents: a path that is mistyped must not come into being
        _remove_left(folder, rank)
        held = _made(path)
        try:
            os.posix_fallocate(held, 0, size)
            return torch.from_file(f"/proc/self/fd/{held}", shared=True, size=size, dtype=torch.uint8)
        finally:
            path.unlink(missing_ok=True)
            os.close(held)
    except OSError as error:
        raise _no_room(folder, size, error) from error


def _made(path: Path) -> int:
    """A new file, locked as long as it has a name."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def _remove_left(folder: Path, rank: int) -> None:
    """Files of this rank that nobody has locked: of a run that was killed while it reserved its room."""
    for path in folder.glob(f"{_PREFIX}{rank}-*"):
        with suppress(OSError):
            found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            finally:
                os.close(found)


def _no_room(folder: Path, size: int, error: OSError) -> DataError:
    found, elsewhere = error.strerror or str(error), "--set layout.offload_dir=ANOTHER/PLACE"
    in_the_way = next(
        (place for place in (folder, *folder.parents) if place.exists() and not place.is_dir()), None
    )
    if in_the_way is not None:
        found, why = (
            f"{in_the_way} is a file, not a folder",
            "each rank keeps a file of its own in that folder",
        )
        instead = f"--set layout.offload_dir={in_the_way.parent}"
    elif is_full(error):
        why = (
            "the whole of it is reserved before the first step: a disk that is full later would kill the rank"
        )
        instead = f"df -h {folder}  (free some room, or {elsewhere})"
    elif not folder.parent.is_dir():
        why = "folders above it are not made: a path that is mistyped must not come into being"
        instead = f"mkdir -p {folder}, or {elsewhere}"
    else:
        why = "each rank keeps a file of its own there, open for reading and writing until the run ends"
        place = folder if folder.is_dir() else folder.parent
        instead = f"ls -ld {place}  (shows who may write there; or {elsewhere})"
    return DataError(
        Problem(
            asked=f'layout.offload = "disk": {size / 2**20:,.1f} MiB for the moments in {folder}',
            found=found,
            why=why,
            instead=instead,
        )
    )
