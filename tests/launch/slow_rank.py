"""A rank that takes a while to import: `python slow_rank.py RUN_DIR HOW`.

It waits for `imported` in RUN_DIR, tells how signals stand in a program that it starts, then does HOW: "wait" for a
request to stop and end with 75, or "hang" in the imports for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

SHOW = (
    "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith(('SigBlk', 'SigIgn'))])"
)

run_dir, how = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
(run_dir / f"importing{rank}.tmp").write_text(str(os.getpid()))
os.rename(run_dir / f"importing{rank}.tmp", run_dir / f"importing{rank}")
while how == "hang" or not (run_dir / "imported").exists():
    time.sleep(0.01)

from fourfold.launch.stop import StopRequest  # noqa: E402


def show(masks: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SHOW], capture_output=True, text=True, check=True
    )
    masks.append(done.stdout.strip())


with StopRequest() as stop:
    masks: list[str] = []
    show(masks)
    thread = threading.Thread(target=show, args=(masks,))
    thread.start()
    thread.join()
    (run_dir / f"masks{rank}").write_text(json.dumps(masks))
    while not stop.requested:
        time.sleep(0.01)
    time.sleep(0.2)  # for the same wish, told again
    os._exit(75)
