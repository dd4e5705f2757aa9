"""A rank of a pool: joins, then does one job after another until its pipe says to end, or is gone."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

from fourfold.launch.failure import FailureReport, describe, is_secondary
from fourfold.launch.guard import STACK_SIGNAL
from fourfold.launch.pulse import START
from fourfold.launch.rank import Rank, backend_of, bind, loopback, record_collectives
from fourfold.spec.errors import EXIT_BUG, FourfoldError

DONE, FAILED = b"+", b"-"  # the first byte of an answer; the rest is a pickled result, or a report in JSON


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in a pool. folder: of the rendezvous store and the stacks."""

    rank: int
    world: int
    folder: str
    timeout_s: float
    threads: int
    setup: str | None
    device: str = "cpu"


def serve(pipe: Connection, place: Place) -> None:
    """The life of one rank; what a job raises is sent back, with its traceback, and the pool ends."""
    os.setsid()  # what a job starts ends with the rank
    threading.Thread(target=_follow_parent, args=(place.folder,), daemon=True).start()
    with open(stack_file(place.folder, place.rank), "w", encoding="utf-8") as stacks:
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        try:
            _join(place)
            pipe.send_bytes(DONE + pickle.dumps(None))
            while job := pipe.recv_bytes():
                function, args = pickle.loads(job)
                pipe.send_bytes(DONE + pickle.dumps(function(*args)))
            _part()
        except EOFError:
            pass  # the parent is gone
        except BaseException as error:
            pipe.send_bytes(FAILED + _report(place.rank, error).model_dump_json().encode())
            signal.pause()  # others still wait for this rank: the parent ends all of them
        finally:
            faulthandler.unregister(STACK_SIGNAL)


def stack_file(folder: str, rank: int) -> Path:
    """Where a rank's stacks go when they are asked for."""
    return Path(folder) / f"stacks{rank}.txt"


def _join(place: Place) -> None:
    import torch
    import torch.distributed as dist

    here = Rank(place.rank, place.rank, place.world, place.world)
    device = bind(place.device, here)
    record_collectives()
    interface = loopback()
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    torch.set_num_threads(place.threads)
    dist.init_process_group(
        backend_of(device),
        store=dist.FileStore(str(Path(place.folder) / "store"), place.world),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=place.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    if place.setup is not None:
        module, _, name = place.setup.partition(":")
        getattr(importlib.import_module(module), name)()


def _part() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # a job may have ended the group itself
        dist.destroy_process_group()


def _report(rank: int, error: BaseException) -> FailureReport:
    return FailureReport(
        rank=rank,
        kind="collective" if is_secondary(error) else "raised",
        step=0,
        phase=START,
        message=describe(error),
        exit_code=error.exit_code if isinstance(error, FourfoldError) else EXIT_BUG,
        time=time.time(),
        traceback="".join(traceback.format_exception(error)),
        problems=error.problems if isinstance(error, FourfoldError) else (),
    )


def _follow_parent(folder: str) -> None:
    """A rank may be deep in a collective when its parent dies; it, and what it started, must not stay behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)
