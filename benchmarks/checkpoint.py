"""Saving and loading 1 GiB on 2 ranks against torch.distributed.checkpoint's default writer and reader.

    python benchmarks/checkpoint.py [--pairs 12] [--mib 1024] [--nproc 2] [--tensors replicated|sharded] [--folder .]

Both write to fresh folders on the same disk and flush to it; Fourfold also hashes every byte it writes and reads.
They save in turn, in an order that alternates, then load in turn; between them the folders of the round before are
removed and the disk is left to settle. A round's time is that of the slowest rank. A second run of torch's in each
round is the null control. Judged is the median of the paired ratios, Fourfold / torch; with its 95 % bootstrap
interval it is to be at most 1.0, for the save and for the load. Exit code 3 if it is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paired import interval_of_median

LIMIT = 1.0
WARM_UP_ROUNDS = 2


def make_tensors(mib: int, kind: str) -> dict[str, Any]:
    """Matrices of 16 MiB and vectors of 16 KiB, like a transformer's; replicated, or cut along dim 0 over all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if kind == "sharded" else None
    found: dict[str, Any] = {}
    for number in range(mib // 16):
        found[f"layer{number}.weight"] = torch.randn(2048, 2048)
        found[f"layer{number}.bias"] = torch.randn(4096)
    if mesh is not None:
        return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in found.items()}
    return found


def ways(tensors: dict[str, Any]) -> dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]]:
    """Save and load into a folder, by name of the way."""
    import torch.distributed.checkpoint as dcp

    from fourfold.checkpoint.load import load
    from fourfold.checkpoint.save import SaveFacts, save

    facts = SaveFacts(step=1, position=0, layout={}, spec_hash="", data_hash="")

    def torch_save(folder: Path) -> None:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder))

    def torch_load(folder: Path) -> None:
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder))

    return {
        "fourfold": (
            lambda folder: (save(tensors, {}, folder, facts), None)[1],
            lambda folder: (load(folder / "step-00000001", tensors), None)[1],
        ),
        "torch": (torch_save, torch_load),
        "torch again": (torch_save, torch_load),
    }


def measure(folder: str, rounds: int, mib: int, kind: str) -> dict[str, list[dict[str, float]]]:
    """In each rank: seconds of each way's save and load, per round, of the slowest rank."""
    import torch
    import torch.distributed as dist

    by_name = ways(make_tensors(mib, kind))
    times: dict[str, list[dict[str, float]]] = {"save": [], "load": []}

    def timed(call: Callable[[Path], None], place: Path) -> float:
        dist.barrier()
        start = time.perf_counter()
        call(place)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    for index in range(rounds):
        order = list(by_name)
        order = order[index % 3 :] + order[: index % 3]
        if index % 2:
            order.reverse()
        places = {name: Path(folder) / f"{index}-{name.replace(' ', '-')}" for name in order}
        for part, which in (("save", 0), ("load", 1)):
            seconds = {}
            for name in order:
                if dist.get_rank() == 0:
                    os.sync()
                seconds[name] = timed(by_name[name][which], places[name])
            times[part].append(seconds)
        dist.barrier()
        if dist.get_rank() == 0:
            for place in places.values():
                shutil.rmtree(place)
    return {part: found[WARM_UP_ROUNDS:] for part, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--tensors", choices=("replicated", "sharded"), default="replicated")
    parser.add_argument("--folder", default=".", help="where to write: a disk, not memory")
    asked = parser.parse_args()

    from fourfold.launch.pool import RankPool

    with (
        tempfile.TemporaryDirectory(dir=asked.folder) as folder,
        RankPool(asked.nproc, timeout_s=3600) as pool,
    ):
        rounds = asked.pairs + WARM_UP_ROUNDS
        found = pool.run(measure, folder, rounds, asked.mib, asked.tensors)[0]

    passed = True
    print(f"{asked.mib} MiB, {asked.tensors}, on {asked.nproc} ranks, {asked.pairs} rounds")
    for part, times in found.items():
        medians = (f"{name} {statistics.median(t[name] for t in times):.3f} s" for name in times[0])
        print(f"{part}: median {', '.join(medians)}")
        for name in ("fourfold", "torch again"):
            median, low, high = interval_of_median([t[name] / t["torch"] for t in times])
            print(f"  {name} / torch: median {median:.3f}, 95 % interval {low:.3f} to {high:.3f}")
            if name == "fourfold":
                passed = passed and median <= LIMIT
                print(f"  {median:.3f} <= {LIMIT}: {'pass' if median <= LIMIT else 'FAIL'}")
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
