"""From the kill of a rank to the first new step of all of them, under `fourfold train --max-restarts`, part by part.

    python benchmarks/restart.py [--kills 12] [--spec tiny] [--nproc 2] [--every 5] [--folder .] [--set a.b=value ...]

One run, saved every so many steps; at a random moment after its first new step a random rank gets SIGKILL, again and
again. The parts follow from what the run records, by the wall clock:

    detect      from the kill until the launcher has concluded, all ranks gone      attempts.jsonl, "end"
    restart     until the checkpoint is chosen and the new processes are started    attempts.jsonl, "start"
    import      until the last rank has imported torch and joined the others        events, "joined"
    load        until data, model and state are there and the warm-up is done       events, "start"
    first step  until the last rank has done its first new step                     events, "step"

Judged is the median of the whole, which is to be at most 8 s. Exit code 3 if it is not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from fourfold.record.reader import read_lines
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import EXIT_STOPPED

LIMIT_S = 8.0
PATIENCE_S = 300.0  # for one start, on a machine however busy
PARTS = ("detect", "restart", "import", "load", "first step")
Times = dict[str, float]  # of one attempt, unix seconds: the last rank's


def begun(run: RunDir, nproc: int, attempt: int) -> Times | None:
    """When this attempt had joined, loaded and done its first step; None while it has not."""
    found: list[Times] = []
    for rank in range(nproc):
        own: Times = {}
        of_it = False
        for event in read_lines(run.events(rank)) if run.events(rank).exists() else ():
            if event["kind"] == "joined":
                of_it = event["attempt"] == attempt
            if of_it:
                own.setdefault(event["kind"], event["t"])
        found.append(own)
    if not all("step" in own for own in found):
        return None
    return {kind: max(own[kind] for own in found) for kind in ("joined", "start", "step")}


def attempts(run: RunDir, kind: str) -> dict[int, dict[str, Any]]:
    """The lines of one kind in attempts.jsonl, by attempt."""
    return {line["attempt"]: line for line in read_lines(run.attempts) if line["kind"] == kind}


def wait_until_begun(process: subprocess.Popen[bytes], run: RunDir, nproc: int, attempt: int) -> Times:
    until = time.monotonic() + PATIENCE_S
    while (times := begun(run, nproc, attempt)) is None:
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"attempt {attempt} made no step; see {run.path}/log.txt and failures.md")
        time.sleep(0.1)
    return times


def measure(folder: str, asked: argparse.Namespace) -> list[Times]:
    """Seconds of each part, for every kill."""
    run, rng = RunDir(Path(folder) / "run"), random.Random(0)
    sets = [f"run.dir={json.dumps(str(run.path))}", f"checkpoint.every={asked.every}", "run.steps=1000000"]
    flags = [word for setting in (*sets, "run.validate_every=0", *asked.set) for word in ("--set", setting)]
    command = [sys.executable, "-m", "fourfold", "train", asked.spec, "--nproc", str(asked.nproc)]
    command += ["--max-restarts", str(asked.kills), *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    found = []
    try:
        wait_until_begun(process, run, asked.nproc, 0)
        for attempt in range(asked.kills):
            while not list(run.checkpoints.glob("step-*")):
                time.sleep(0.1)
            time.sleep(rng.uniform(0.0, 4.0))
            pids = attempts(run, "start")[attempt]["pids"]
            killed = time.time()
            os.kill(rng.choice(pids), signal.SIGKILL)
            times = wait_until_begun(process, run, asked.nproc, attempt + 1)
            ended, started = attempts(run, "end")[attempt]["t"], attempts(run, "start")[attempt + 1]["t"]
            moments = [killed, ended, started, times["joined"], times["start"], times["step"]]
            seconds = [after - before for before, after in pairwise(moments)]
            found.append({**dict(zip(PARTS, seconds, strict=True)), "whole": times["step"] - killed})
            print(" ".join(f"{name} {value:.2f}" for name, value in found[-1].items()), flush=True)
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(PATIENCE_S)) != EXIT_STOPPED:
            raise SystemExit(f"the run ended with {code}, not {EXIT_STOPPED}")
    finally:
        process.kill()
        process.wait()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--spec", default="tiny")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--folder", default=".", help="where to run")
    parser.add_argument("--set", action="append", default=[], help="one setting, a.b=value; may be repeated")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        found = measure(folder, asked)
    print(f"{asked.spec} on {asked.nproc} ranks, {len(found)} kills")
    print(f"{'part':<12}{'median s':>9}{'max s':>9}")
    for name in (*PARTS, "whole"):
        values = [times[name] for times in found]
        print(f"{name:<12}{statistics.median(values):9.2f}{max(values):9.2f}")
    median = statistics.median(times["whole"] for times in found)
    print(f"{median:.2f} <= {LIMIT_S:g}: {'pass' if median <= LIMIT_S else 'FAIL'}")
    return 0 if median <= LIMIT_S else 3


if __name__ == "__main__":
    sys.exit(main())
