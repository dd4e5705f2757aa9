"""Room on disk for moments: reserved at once, without a name, and refused in four parts where it is not to be had."""

from __future__ import annotations

import fcntl
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from fourfold.parallel.offload import MappedMoments, home, mapped, offload_policy
from fourfold.spec.errors import EXIT_UNREADABLE, DataError
from fourfold.spec.training import LayoutSpec
from tests.forbidden import forbidden

HELD = {"w": torch.ones(5, 3), "b": torch.ones(7, dtype=torch.float64), "e": torch.empty(0, 4)}


def test_moments_are_zeros_of_their_own(tmp_path):
    room = MappedMoments(HELD, partial(mapped, tmp_path / "new", 0))
    slots = {(name, slot): t for name in HELD for slot, t in room.slots(name).items()}
    for (name, _), tensor in slots.items():
        assert (tensor.shape, tensor.dtype) == (HELD[name].shape, HELD[name].dtype)
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous() and not tensor.any()
    for number, tensor in enumerate(slots.values(), 1):
        tensor.fill_(number)
    assert all((t == number).all() for number, t in enumerate(slots.values(), 1))
    again = room.slots("w")["exp_avg"]
    again += 1
    assert torch.equal(again, slots["w", "exp_avg"])  # the same memory
    assert room.room.nbytes == 2 * 64 + 2 * 64


def test_the_file_has_no_name_once_it_is_mapped(tmp_path):
    room = MappedMoments(HELD, partial(mapped, tmp_path, 3))
    assert list(tmp_path.iterdir()) == []
    assert room.room.untyped_storage().filename is not None
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "moments-rank3" in line]
    assert len(lines) == 1 and lines[0].endswith("(deleted)")


def test_nothing_to_update_takes_no_room_worth_naming(tmp_path):
    assert MappedMoments({}, partial(mapped, tmp_path, 0)).room.nbytes == 64


def test_what_a_killed_run_left_goes_and_what_is_in_use_stays(tmp_path):
    names = ("moments-rank0-11", "moments-rank0-12", "moments-rank1-11", "other")
    left, used, of_another_rank, other = (tmp_path / name for name in names)
    for path in (left, used, of_another_rank, other):
        path.write_bytes(b"x")
    with used.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        MappedMoments(HELD, partial(mapped, tmp_path, 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_a_process_that_is_killed_leaves_nothing(tmp_path):
    code = (
        "import os, signal, sys, torch; from functools import partial; from pathlib import Path;"
        "from fourfold.parallel.offload import MappedMoments, mapped;"
        "m = MappedMoments({'w': torch.ones(9)}, partial(mapped, Path(sys.argv[1]), 0));"
        "m.slots('w')['exp_avg'].fill_(1.0);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert ended.returncode == -9 and list(tmp_path.iterdir()) == []


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        MappedMoments({"w": torch.zeros(2**20)}, partial(mapped, folder, 0))
    (problem,) = caught.value.problems
    assert caught.value.exit_code == EXIT_UNREADABLE
    assert problem.asked == f'layout.offload = "disk": 8.0 MiB for the moments in {folder}'
    assert problem.found and problem.why and problem.instead
    return str(problem)


def test_too_little_room_is_told_before_anything_is_trained(tmp_path):
    with files_of_at_most(2**20):
        text = refused(tmp_path)
    assert "File too large" in text and f"df -h {tmp_path}" in text
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_trained(tmp_path):
    mount = shutil.which("mount")
    tmpfs = [str(mount), "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)]
    if not mount or subprocess.run(tmpfs, capture_output=True, check=False).returncode:
        pytest.skip("a disk of its own takes root's rights")
    try:
        assert "No space left on device" in refused(tmp_path)
        assert list(tmp_path.iterdir()) == []
        MappedMoments({"w": torch.zeros(2**18)}, partial(mapped, tmp_path, 0))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_folder_that_is_not_there_is_made_and_its_parents_are_not(tmp_path):
    text = refused(tmp_path / "no" / "such")
    assert "No such file or directory" in text and f"mkdir -p {tmp_path}/no/such" in text
    assert "why:   folders above it are not made" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "under/it"])
def test_a_file_is_no_folder(tmp_path, below):
    (tmp_path / "file").write_text("")
    text = refused(tmp_path / "file" / below)
    assert f"found: {tmp_path}/file is a file, not a folder" in text
    assert f"type:  --set layout.offload_dir={tmp_path}\n" in text + "\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize("below", ["", "new"])
def test_a_folder_that_may_not_be_written(tmp_path, below):
    with forbidden(tmp_path):
        text = refused(tmp_path / below)
    assert "not permitted" in text or "denied" in text
    assert "why:   each rank keeps a file of its own there" in text
    assert f"type:  ls -ld {tmp_path}  " in text


def test_on_the_cpu_there_is_nothing_to_move():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    away = LayoutSpec(zero=3, offload="cpu")
    assert (home(away, cpu), home(away, cuda)) == (cpu, cpu)
    assert isinstance(offload_policy(away, cuda), CPUOffloadPolicy)
    assert not isinstance(offload_policy(away, cpu), CPUOffloadPolicy)
    for other in (LayoutSpec(zero=3), LayoutSpec(zero=3, offload="disk")):
        assert home(other, cuda) == cuda and not isinstance(offload_policy(other, cuda), CPUOffloadPolicy)
