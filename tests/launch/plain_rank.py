"""A rank without torch: `python plain_rank.py RUN_DIR HOW_0 HOW_1 ...`; the last HOW is for all further ranks.

HOW is one way for each attempt, with "/" between them; the last is for all further ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fourfold.launch.guard import guard
from fourfold.launch.pulse import Pulse
from fourfold.launch.rank import Rank
from fourfold.launch.stop import StopRequest
from fourfold.spec.errors import DataError, Problem, SpecError, Stopped

SHOWN = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "FOURFOLD_ATTEMPT", "GLOO_SOCKET_IFNAME")


def main() -> None:
    run_dir, ways = Path(sys.argv[1]), sys.argv[2:]
    rank = Rank.from_environment()
    assert rank is not None
    by_attempt = ways[min(rank.rank, len(ways) - 1)].split("/")
    way = by_attempt[min(rank.attempt, len(by_attempt) - 1)]
    (run_dir / f"pid{rank.rank}").write_text(str(os.getpid()))
    if way == "crash":
        sys.exit("it broke before it could be guarded")
    pulse = Pulse(run_dir / "pulse", rank.rank)
    with guard(rank, None, run_dir, pulse), StopRequest() as stop:
        pulse.beat(5, "forward")
        act(way, rank, run_dir, pulse, stop)


def act(way: str, rank: Rank, run_dir: Path, pulse: Pulse, stop: StopRequest) -> None:
    match way:
        case "show":
            print(f"rank {rank.rank} is here")
            shown = {name: os.environ.get(name) for name in SHOWN}
            (run_dir / f"env{rank.rank}.json").write_text(json.dumps(shown))
        case "sleep" | "patient":
            pulse.beat(5, "forward", patient=way == "patient")
            time.sleep(1.5 if way == "patient" else 1000)
        case "kill" | "abort":
            os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGABRT)
        case "raise" | "raise-last":
            if way == "raise-last":
                others_ready(run_dir, rank.world)
            raise SpecError(Problem("a", "b", "c", "d"))
        case "bug":
            raise ValueError("a plain bug")
        case "passing":
            raise Passing(Problem("a", "b", "c", "d"))
        case "port":
            with open(run_dir / f"ports{rank.rank}", "a") as file:
                print(os.environ["MASTER_PORT"], file=file)
            raise ValueError("so that there is another attempt")
        case "quit":
            os._exit(7)
        case "wait-bug":
            wait_for(stop, pulse)
            raise ValueError("a bug while it stopped")
        case "late":
            while "bug" not in read(run_dir / "failures" / "rank1.json"):
                time.sleep(0.01)
            time.sleep(0.2)  # for the launcher to look
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(1000)
        case "lost":
            (run_dir / f"ready{rank.rank}").touch()
            raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
        case "stopped":
            raise Stopped(Problem("a", "b", "c", "d"))
        case "wait":
            wait_for(stop, pulse)
            raise Stopped(Problem("a", "b", "c", "d"))
        case "signal" | "signal-twice":
            others_ready(run_dir, rank.world)
            os.kill(os.getppid(), signal.SIGTERM)
            if way == "signal-twice":
                time.sleep(0.6)
                os.kill(os.getppid(), signal.SIGINT)
            act("wait", rank, run_dir, pulse, stop)
        case "deaf":
            (run_dir / f"ready{rank.rank}").touch()
            time.sleep(1000)
        case "parent":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            (run_dir / "child").write_text(str(child.pid))
            (run_dir / f"ready{rank.rank}").touch()
            act("sleep" if rank.rank else "show", rank, run_dir, pulse, stop)
        case _:
            assert way == "end", way


class Passing(DataError):
    """An error after which the same may go well."""

    passing = True


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def others_ready(run_dir: Path, world: int) -> None:
    while len(list(run_dir.glob("ready*"))) < world - 1:
        time.sleep(0.01)


def wait_for(stop: StopRequest, pulse: Pulse) -> None:
    rank = Rank.from_environment()
    assert rank is not None
    (Path(sys.argv[1]) / f"ready{rank.rank}").touch()
    while not stop.requested:
        pulse.beat(5, "forward")
        time.sleep(0.01)


main()
