"""What the pool's tests run in its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.spec.errors import CheckFailed, Problem

planted = "nothing"


def plant() -> None:
    global planted
    planted = "a fault"


def plant_badly() -> None:
    raise KeyError("no such fault")


def what_is_planted() -> str:
    return planted


def add_up(value: float, extra: float = 0.0) -> torch.Tensor:
    total = torch.tensor([value + extra + dist.get_rank()])
    dist.all_reduce(total)
    return total


def surroundings() -> tuple[int, int, bool, bool]:
    own_handlers = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    own_handlers &= signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return torch.get_num_threads(), os.getpid(), os.getpgid(0) == os.getpid(), own_handlers


def echo(payload: bytes) -> bytes:
    return payload


def unpicklable() -> object:
    return lambda: None


def fail(rank: int, how: str) -> None:
    """That rank does it; the others wait for it in a collective."""
    if dist.get_rank() == rank:
        match how:
            case "raise":
                raise ValueError("an error of its own")
            case "check":
                raise CheckFailed(Problem("asked", "found", "why", "instead"))
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "hang":
                time.sleep(1000)
    dist.barrier()


def start_a_child_and_hang(folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(folder, f"{dist.get_rank()}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def hold_a_pool(folder: str) -> None:
    """Not a job: the life of a parent that is killed while its ranks are busy."""
    from fourfold.launch.pool import RankPool

    with RankPool(2, timeout_s=600) as pool:
        pool.run(start_a_child_and_hang, folder)
