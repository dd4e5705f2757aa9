"""The mutation suite: every planted fault against every check that ships, and runs without a fault.

    python -m tests.mutants                       # all that is not written down yet, then the table
    python -m tests.mutants --only never_synced --checks run,equal --again
    python -m tests.mutants --clean 200 --checks none
    python -m tests.mutants --table               # the table in docs/faults.md from what is written down

Results are in runs/mutants/. Exit code 1: fewer than 95 % of the kinds are caught, or a run without a fault was
stopped.
"""

# Ranks import this module when they start, before a fault is planted in them: it must not import what faults replace.
from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    asked.formatter_class = argparse.RawDescriptionHelpFormatter
    asked.add_argument("--only", default="", help="faults, kinds' numbers or parts of names, with commas")
    asked.add_argument("--checks", default="run,equal,coverage,exact,resume", help="with commas; or none")
    asked.add_argument("--clean", type=int, default=200, help="runs without a fault")
    asked.add_argument("--jobs", type=int, default=1, help="checks at a time")
    asked.add_argument("--again", action="store_true", help="also what is written down")
    asked.add_argument("--table", action="store_true", help="run nothing")
    asked.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutants")
    from tests.mutants import suite

    return suite.main(ROOT, asked.parse_args())


if __name__ == "__main__":
    sys.exit(main())
