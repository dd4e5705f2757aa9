"""What the tests of this room run in ranks, and the tensors they save."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fourfold.checkpoint import publish, shard_file, storage_writer
from fourfold.checkpoint.load import load
from fourfold.checkpoint.save import SaveFacts, save
from fourfold.spec.errors import DataError

STATE = {"scale": 65536.0, "words": ["é", None, True], "counter": 2**60}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
_MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def facts(step: int = 10) -> SaveFacts:
    return SaveFacts(
        step=step,
        position=step * 8,
        layout={"dp_shard": 2, "sp": False},
        spec_hash="0" * 32,
        data_hash="1" * 32,
    )


def random_bytes(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern, not-a-numbers and all; a bool is 0 or 1."""
    draw = torch.Generator().manual_seed(seed)
    width = torch.empty((), dtype=dtype).element_size()
    count = int(torch.Size(shape).numel()) * width
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=draw)
    return data.view(dtype).view(tuple(shape))


def every_kind() -> dict[str, torch.Tensor]:
    """Tensors of every dtype and of awkward shapes: scalars, empty ones, strided ones, tied ones, a large one."""
    found = {f"dtype.{dtype}": random_bytes((3, 5), dtype, 1) for dtype in DTYPES}
    found |= {f"scalar.{dtype}": random_bytes((), dtype, 2) for dtype in DTYPES}
    found["empty"] = torch.empty(0)
    found["no columns"] = torch.empty(3, 0, dtype=torch.int64)
    found["transposed"] = random_bytes((4, 7), torch.float32, 3).T
    found["every other"] = random_bytes((6, 8), torch.bfloat16, 4)[:, ::2]
    found["tied.a"] = random_bytes((9,), torch.float32, 5)
    found["tied.b"] = found["tied.a"]
    found["large"] = random_bytes((3, 2**20), torch.float16, 6)
    found["large transposed"] = random_bytes((7, 2**18), torch.float64, 7).T
    found["a name/with: odd [signs]"] = torch.nn.Parameter(torch.ones(2, 2))
    return found


def bits(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def emptied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same kind with other contents; strides as they are."""
    with torch.no_grad():
        return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def differing(folder: str, expected: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of those whose bits are not as expected after a load; and the state, if it is not."""
    found = emptied(expected)
    state = load(folder, found)
    wrong = [name for name in expected if bits(found[name]) != bits(expected[name])]
    return wrong + ([] if state == STATE else ["state"])


def save_every_kind(folder: str, step: int = 10) -> str:
    return str(save(every_kind(), STATE, folder, facts(step)))


def every_kind_differs(folder: str) -> list[str]:
    return differing(folder, every_kind())


def no_pickle(folder: str) -> list[str]:
    """A round trip of a world of one with all that unpickles poisoned."""

    def poison(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("something was unpickled")

    names = [
        (torch, "load"), (torch, "save"), (pickle, "loads"), (pickle, "load"), (pickle, "dumps"),
        (pickle, "dump"), (pickle, "Unpickler"), (dist.distributed_c10d, "_unpickler"),
    ]  # fmt: skip
    kept = [getattr(owner, name) for owner, name in names]
    for owner, name in names:
        setattr(owner, name, poison)
    try:
        return differing(str(save(every_kind(), STATE, folder, facts())), every_kind())
    finally:
        for (owner, name), value in zip(names, kept, strict=True):
            setattr(owner, name, value)


def mesh(*shape: int) -> DeviceMesh:
    if shape not in _MESHES:
        _MESHES[shape] = init_device_mesh("cpu", shape)
    return _MESHES[shape]


def wholes() -> dict[str, torch.Tensor]:
    """What the sharded ones are cut from; 5 rows do not divide, and 1 row leaves ranks without any."""
    return {
        "rows": random_bytes((5, 6), torch.float32, 11),
        "one row": random_bytes((1, 6), torch.bfloat16, 12),
        "columns": random_bytes((4, 3), torch.float64, 13),
        "replicated": random_bytes((3, 3), torch.float32, 14),
        "both": random_bytes((7, 5), torch.int64, 15),
        "nothing": torch.empty(0, 4),
        "plain": random_bytes((11,), torch.float32, 16),
    }


def cut(*shape: int) -> dict[str, torch.Tensor]:
    """`wholes` as DTensors on a mesh of 1 or 2 dims; "plain" stays a tensor."""
    over = mesh(*shape)
    one = len(shape) == 1
    places: dict[str, list[Any]] = {
        "rows": [Shard(0)] if one else [Replicate(), Shard(0)],
        "one row": [Shard(0)] if one else [Shard(0), Replicate()],
        "columns": [Shard(1)] if one else [Shard(1), Replicate()],
        "replicated": [Replicate()] * len(shape),
        "both": [Shard(0)] if one else [Shard(0), Shard(1)],
        "nothing": [Shard(0)] if one else [Shard(0), Replicate()],
    }
    whole = wholes()
    found = {name: distribute_tensor(whole[name], over, place) for name, place in places.items()}
    return {**found, "plain": whole["plain"]}


def save_cut(folder: str, *shape: int) -> str:
    return str(save(cut(*shape), STATE, folder, facts()))


def cut_differs(folder: str, *shape: int) -> list[str]:
    return differing(folder, cut(*shape))


def wholes_differ(folder: str) -> list[str]:
    return differing(folder, wholes())


def replicated(count: int = 8) -> dict[str, torch.Tensor]:
    return {f"layer{number}.weight": random_bytes((64, 64), torch.float32, number) for number in range(count)}


def save_replicated(folder: str, step: int = 10) -> str:
    return str(save(replicated(), STATE, folder, facts(step)))


def replicated_differs(folder: str) -> list[str]:
    return differing(folder, replicated())


def save_small_ones_first(folder: str) -> str:
    tensors = {"a": torch.zeros(100), "b": torch.zeros(100), "c": torch.zeros(200)}
    return str(save(tensors, STATE, folder, facts()))


def save_own(folder: str) -> list[str]:
    """Each rank saves a tensor of its own beside a shared one; each asks for its own and the shared one again."""
    own = {
        f"stage{dist.get_rank()}": random_bytes((4,), torch.float32, dist.get_rank()),
        "shared": torch.ones(2),
    }
    return differing(str(save(own, STATE, folder, facts())), own)


def told(call: Callable[[], Any]) -> str:
    """The DataError that a call ends in, as text."""
    try:
        call()
    except DataError as error:
        return str(error)
    return ""


def save_fails(folder: str, step: int = 10) -> str:
    return told(lambda: save(replicated(), STATE, folder, facts(step)))


def load_fails(folder: str, wanted: Sequence[tuple[str, tuple[int, ...], str]], *allow: Sequence[str]) -> str:
    missing, surplus = allow or ((), ())
    tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in wanted}
    return told(lambda: load(folder, tensors, allow_missing=missing, allow_surplus=surplus))


def only_rank_1_wants(folder: str, name: str) -> str:
    mine = replicated() if dist.get_rank() == 0 else {**replicated(), name: torch.zeros(1)}
    return told(lambda: load(folder, mine))


def disk_full_on(who: int, folder: str) -> str:
    """What each rank is told when rank `who` may write no file over 20,000 bytes; a shard here is larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == who:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        return save_fails(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def flush_fails(folder: str) -> str:
    """What is told when the disk refuses to flush the first file."""
    kept = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        kept(handle)

    os.fsync = refuse
    try:
        return save_fails(folder)
    finally:
        os.fsync = kept


# Where a save can find no room: on any rank, and on rank 0 alone.
PLACES = ("shard", "flush of .safetensors")
PLACES_OF_0 = ("mkdir", "flush of state.json", "flush of manifest.json", "rename", "flush of the rename")


@contextmanager
def no_room(place: str) -> Iterator[None]:
    """In this process the disk is full at one place of a save: nothing more can be written, made or flushed there."""

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def unless(keep: Callable[..., Any], hit: Callable[..., bool]) -> Callable[..., Any]:
        return lambda *args, **more: full() if hit(*args) else keep(*args, **more)

    def half_of(keep: Callable[..., Any]) -> Callable[..., Any]:
        def pieces(*args: Any) -> Iterator[memoryview]:
            yield next(keep(*args))
            full()

        return pieces

    def of(handle: int, name: str) -> bool:
        path = os.readlink(f"/proc/self/fd/{handle}")
        return path.endswith("/ckpt") if name == "the rename" else name in path

    if place == "shard":
        owner, name, instead = shard_file, "_file_pieces", half_of(shard_file._file_pieces)
    elif place == "mkdir":
        owner, name, instead = os, "mkdir", unless(os.mkdir, lambda path, *_: ".saving-" in str(path))
    elif place == "rename":
        owner, name, instead = os, "rename", unless(os.rename, lambda _, to: "/step-" in str(to))
    else:
        what = place.removeprefix("flush of ")
        owner, name, instead = os, "fsync", unless(os.fsync, lambda handle: of(handle, what))
    keep = getattr(owner, name)
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, keep)


def save_without_room(folder: str, who: int, place: str, step: int) -> str:
    """What each rank is told when rank `who` finds no room at `place`."""
    with no_room(place) if dist.get_rank() == who else nullcontext():
        return save_fails(folder, step)


def left_when_told(folder: str) -> list[str]:
    """What lies there when a rank is told that rank 1 found no room, though rank 0 is slow to clear it away."""
    keep = storage_writer.discard

    def slowly(path: Path) -> None:
        time.sleep(0.2)
        keep(path)

    storage_writer.discard = slowly
    try:
        assert save_without_room(folder, 1, "shard", 10)
        return parts(folder)
    finally:
        storage_writer.discard = keep


def peak_of_a_round_trip(folder: str, mib: int) -> tuple[int, int]:
    """Bytes by which the memory of this rank grew at most while it saved, and loaded, so many MiB of the world's."""
    tensors = {f"layer{number}": torch.ones(2**18) * number for number in range(mib)}
    tensors["transposed"] = torch.ones(1024, 4096).T
    grown = []
    path = ""

    def saved() -> None:
        nonlocal path
        path = str(save(tensors, STATE, folder, facts()))

    for call in (saved, lambda: load(path, tensors)):
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = _memory("VmRSS")
        call()
        grown.append(_memory("VmHWM") - before)
    return grown[0], grown[1]


def _memory(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def save_killed(folder: str, who: int, place: str) -> str:
    """Rank `who` is killed by SIGKILL at a place in the save: in its file, before the manifest, before the rename."""
    if dist.get_rank() == who:
        owner, name = {
            "file": (shard_file.xxhash, "xxh3_128"),
            "written": (storage_writer, "WriteResult"),
            "manifest": (publish, "Manifest"),
            "rename": (publish.os, "rename"),
        }[place]
        setattr(owner, name, _die)
    return str(save(replicated(), STATE, folder, facts(20)))


def _die(*_args: Any, **_kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def parts(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())
