"""A rank with torch: `python torch_rank.py RUN_DIR TIMEOUT_S HOW`; rank 1 does HOW at step 5, between collectives."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.launch.guard import guard
from fourfold.launch.pulse import Pulse
from fourfold.launch.rank import Rank, join

run_dir, timeout_s, how = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
rank = Rank.from_environment()
assert rank is not None
pulse = Pulse(run_dir / "pulse", rank.rank)
with join(rank, "cpu", timeout_s) as joined, guard(rank, joined.store, run_dir, pulse):
    total = torch.ones(3)
    for step in range(1, 7):
        pulse.beat(step, "forward")
        if step == 5 and rank.rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                time.sleep(1000)
            if how == "raise":
                raise ValueError("an error of its own")
            if how == "leave":
                sys.exit()
        dist.all_reduce(total)
    assert total[0] == 2**6
    print(f"rank {rank.rank} of {dist.get_world_size()}: {torch.get_num_threads()} threads")
