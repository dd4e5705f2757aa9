"""One rank of the world: who it is, and how it joins the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.words import counted

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

ATTEMPT = "FOURFOLD_ATTEMPT"  # set by our own launcher only
START_S = 300.0  # between the first rank's start and the last one's
_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Rank:
    """rank of world; local_rank of local_world on this machine; attempt counts restarts from 0."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    attempt: int = 0

    @classmethod
    def from_environment(cls) -> Rank | None:
        """The rank that our launcher or torchrun made of this process; None if neither did.

        SpecError if a launcher said only half of it, or something impossible.
        """
        # The other variables are set for whole machines, too, by some schedulers; this one is a rank's own.
        if "LOCAL_RANK" not in os.environ:
            return None
        missing = [name for name in _NEEDED if not os.environ.get(name)]
        if missing:
            raise _misled(f"LOCAL_RANK is set, but not {', '.join(missing)}")
        attempt = os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
        try:
            rank, local_rank, world, local_world = (int(os.environ[name]) for name in _NEEDED[:4])
            found = cls(rank, local_rank, world, local_world, int(attempt))
        except ValueError as error:
            raise _misled(str(error)) from error
        if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
            raise _misled(f"rank {rank} of {world}, local rank {local_rank} of {local_world}")
        return found


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank in its process group. `store` is the rendezvous store, prefixed by the attempt."""

    rank: Rank
    store: Store
    device: torch.device


@contextmanager
def join(rank: Rank, device: str, timeout_s: float) -> Iterator[Joined]:
    """Join the world: gloo on "cpu", NCCL and gloo on "cuda"; "auto" takes cuda if every local rank has a device.

    timeout_s: longest wait in one collective; others may come up to `START_S` late. The group is destroyed on a
    clean exit only: after an error other ranks may be gone or stuck, and nothing here may wait for them.
    Collectives: those of init_process_group. Raises SpecError for a device that is not there; what torch raises
    (`is_secondary`), naming the ranks that are missing, when others do not come. An error that leaves this
    block must end the process as `guard` does: the interpreter's own farewell aborts over a living group.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    place = bind(device, rank)
    record_collectives()
    interface = loopback()
    if rank.world == rank.local_world and interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else gloo resolves this machine's own name
    wait = timedelta(seconds=timeout_s)
    start = timedelta(seconds=max(timeout_s, START_S))
    server, _, _ = next(iter(rendezvous("env://", rank.rank, rank.world, timeout=start)))
    # Endpoints of an attempt that died stay in the store: each attempt has a part of it to itself.
    store = dist.PrefixStore(f"attempt{rank.attempt}", server)  # type: ignore[attr-defined]
    _meet(store, rank, start)
    server.set_timeout(wait)
    dist.init_process_group(
        backend_of(place),
        store=store,
        rank=rank.rank,
        world_size=rank.world,
        timeout=wait,
        device_id=place if place.type == "cuda" else None,
    )
    yield Joined(rank, store, place)
    dist.destroy_process_group()


def record_collectives() -> None:
    """Have torch's flight recorder keep the last collectives of each group, at about 5 us each; before the first."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")


def loopback() -> str | None:
    """The name of this machine's loopback interface, if it has one by a usual name."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def _meet(store: Store, rank: Rank, wait: timedelta) -> None:
    """Wait for every rank; on a slow disk imports of one may end minutes after those of another."""
    here = [f"here/{other}" for other in range(rank.world)]
    store.set(here[rank.rank], "")
    try:
        store.wait(here, wait)
    except RuntimeError as error:
        with suppress(RuntimeError):
            missing = [str(other) for other, key in enumerate(here) if not store.check([key])]
            error.add_note(f"rank {', '.join(missing)} of {rank.world} has not come")
        raise


def backend_of(device: torch.device) -> str:
    """What a process group of ranks on such devices talks through."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def bind(device: str, rank: Rank) -> torch.device:
    """The device of this rank, as `join` chooses it; it becomes the current one. SpecError if it is not there."""
    import torch

    there = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and there < rank.local_world):
        return torch.device("cpu")
    if rank.local_rank >= there:
        raise SpecError(
            Problem(
                asked=f'hardware.device = "{device}", {counted(rank.local_world, "rank")} on this machine',
                found=counted(there, "CUDA device"),
                why=f"local rank {rank.local_rank} needs a device of its own",
                instead="--set 'hardware.device=\"cpu\"'" if there == 0 else f"--nproc {there}",
            )
        )
    place = torch.device("cuda", rank.local_rank)
    torch.cuda.set_device(place)
    return place


def _misled(found: str) -> SpecError:
    return SpecError(
        Problem(
            asked="a rank, from the environment",
            found=found,
            why="a launcher sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            instead="fourfold train SPEC --nproc N, or torchrun; or unset LOCAL_RANK",
        )
    )
