"""How long `fourfold --help` and `fourfold spec show tiny` take in a fresh process, and that neither imports torch.

    python benchmarks/startup.py

The median of 10 runs each, after one that warms the file cache; the two commands take turns, so that a busy moment of
the machine falls on both. Beside them an interpreter that does nothing, as the part that is not ours; and the processor
time, which says whether a wall time over the limit is the machine's being busy.
Exit code 3 if a median is over the limit or torch is imported.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

LIMIT_S = 0.5
RUNS = 10
FOURFOLD = [sys.executable, "-m", "fourfold"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "fourfold --help": [*FOURFOLD, "--help"],
    "fourfold spec show tiny": [*FOURFOLD, "spec", "show", "tiny"],
}
HEAVY = ("torch", "numpy")


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall and processor time of a fresh process, from start to end."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imported(arguments: list[str]) -> list[str]:
    """Which of `HEAVY` a fresh process has imported after the command."""
    script = (
        "import sys; from fourfold.cli.main import main; main(sys.argv[1:]); "
        f"print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True
    )
    return [name for name in HEAVY if name in ended.stderr.splitlines()[-1].split()]


def main() -> int:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():
        seconds(command)
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    failed = False
    print(f"{'command':<26}{'median s':>9}{'worst s':>9}{'cpu s':>9}{'limit s':>9}  imports")
    for name, measured in times.items():
        walls, cpus = zip(*measured, strict=True)
        median = statistics.median(walls)
        ours = name.startswith("fourfold")
        heavy = imported(COMMANDS[name][len(FOURFOLD) :]) if ours else []
        failed |= ours and (median > LIMIT_S or bool(heavy))
        figures = f"{median:9.3f}{max(walls):9.3f}{statistics.median(cpus):9.3f}"
        limit = f"{LIMIT_S:9.2f}  {', '.join(heavy) or 'no torch, no numpy'}" if ours else ""
        print(f"{name:<26}{figures}{limit}")
    print("over the limit" if failed else "within the limit")
    return 3 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
