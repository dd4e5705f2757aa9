"""The order exercise: one rank is late, leaves, or calls its collectives otherwise; who names it, and when.

Each mistake is made twice on real ranks: as torch does it alone, and under fingerprints and watchdog.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.launch.pool import RankPool
from fourfold.record.calls import CALLS, read_calls, told_of
from fourfold.record.finding import Finding, document, fact, write_findings
from fourfold.spec.errors import Problem, RankFailed, SpecError
from fourfold.verify.out import open_folder

if TYPE_CHECKING:
    from fourfold.lab.order_ranks import Came

SCHEMA = "fourfold.lab.order/1"
MOST_RANKS = 8
GROUP_TIMEOUT_S = 8.0  # of every collective in it


@dataclass(frozen=True, slots=True)
class Mistake:
    """function: of `lab.order_ranks`. names: whether the rank that made it is named, and the line of each."""

    function: str
    title: str
    lines: tuple[str, ...] = ()


# With the functions whose lines must be told.
MISTAKES = (
    Mistake("nothing", "no mistake: the last rank takes a third of the time that the others would wait"),
    Mistake(
        "enters_late", "the last rank comes to a sum after the others have given up", ("enters_late", "_sum")
    ),
    Mistake("leaves_early", "it has done one sum less, and ends in good order", ("_sum",)),
    Mistake("another_operation", "it gathers where the others sum", ("another_operation", "_sum")),
    Mistake("another_order", "it sums two tensors of one shape in the other order", ("another_order",)),
    Mistake("another_shape", "it sums a tensor of more rows", ("_sum",)),
    Mistake("another_group_first", "it takes two groups in the other order", ("another_group_first",)),
    Mistake("all_receive", "two ranks receive from one another, and neither has sent", ("all_receive",)),
)


def lab_order(
    *,
    nproc: int = 2,
    mistakes: Sequence[Mistake] = MISTAKES,
    timeout_s: float = GROUP_TIMEOUT_S,
    out: Path | None = None,
    setup: str | None = None,
    command: str = "fourfold lab order",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Make each mistake on `nproc` ranks, without and with Fourfold's watch; the document fourfold.lab.order/1.

    timeout_s: of each collective. setup: "module:function", called in each rank first. out: folder for the findings.
    Raises SpecError for another number of ranks than 2 to 8.
    """
    if not 2 <= nproc <= MOST_RANKS:
        raise SpecError(
            Problem(
                asked=f"fourfold lab order --nproc {nproc}",
                found=f"another number of ranks than 2 to {MOST_RANKS}",
                why="one of them makes the mistake, and at least one other waits for it",
                instead=f"--nproc {2 if nproc < 2 else MOST_RANKS}",
            )
        )
    with open_folder(out, "lab") as folder:
        entries = []
        for mistake in mistakes:
            alone, _ = _made(mistake, False, nproc, timeout_s, setup)
            told, seconds = _made(mistake, True, nproc, timeout_s, setup)
            entries.append(
                {
                    "name": mistake.function,
                    "title": mistake.title,
                    "torch_alone": alone,
                    "fourfold": told,
                    "seconds": seconds,
                }
            )
            say(f"{mistake.title}: {told.splitlines()[-1].strip()[:100] if told else 'goes on'}")
        findings = [
            _finding(mistake, entry, nproc - 1, timeout_s, command)
            for mistake, entry in zip(mistakes, entries, strict=True)
        ]
        more = {"world": nproc, "timeout_s": timeout_s, "mistakes": entries}
        path = write_findings(folder, "lab-order", findings, SCHEMA, **more)
    return document(SCHEMA, findings, **more, findings_file=str(path))


def _made(
    mistake: Mistake, watched: bool, nproc: int, timeout_s: float, setup: str | None
) -> tuple[str, float]:
    """What is told of it, "" where all ranks had their right sums; and after how many seconds."""
    from fourfold.lab.order_ranks import act

    with tempfile.TemporaryDirectory(prefix="fourfold-order-") as scratch:
        folder = Path(scratch)
        failed, came = "", []
        with RankPool(nproc, timeout_s=3 * timeout_s, setup=setup) as pool:
            pool.run(int)  # up: what is timed is the mistake
            since = time.perf_counter()
            try:
                came = pool.run(act, mistake.function, watched, folder, timeout_s)
            except RankFailed as error:
                failed = error.problems[0].found
            seconds = time.perf_counter() - since
        if not watched:
            return _alone(failed, came, nproc), seconds
        told = [path.read_text(encoding="utf-8").partition("\n") for path in sorted(folder.glob("told*"))]
        if told:
            return told[0][2], float(told[0][0])
        if failed:
            return f"{failed.splitlines()[0]}\n  {told_of(read_calls(folder / CALLS))}", seconds
        return came[-1].error, came[-1].seconds


def _alone(failed: str, came: Sequence[Came], nproc: int) -> str:
    """What torch says by itself, or that sums are wrong without a word."""
    if failed:
        return failed
    if said := next((one for one in came if one.error), None):
        return f"after {said.seconds:.0f} s: {said.error.splitlines()[0]}"
    right = tuple(nproc * value for value in (1.0, 10.0, 100.0))
    wrong = {one.sums for one in came if one.sums != right[: len(one.sums)]}
    return f"no error; sums {sorted(wrong)[0]} in place of {right[: len(sorted(wrong)[0])]}" if wrong else ""


def _finding(mistake: Mistake, entry: dict[str, Any], rank: int, timeout_s: float, command: str) -> Finding:
    told: str = entry["fourfold"]
    if not mistake.lines:
        return fact(
            mistake.title, "all ranks have their sums", told or "they have", not told, command=command
        )
    missing = [line for line in mistake.lines if f" in {line}" not in told]
    named = f"rank {rank}" in told and not missing
    soon = entry["seconds"] < timeout_s
    measured = f"{'named' if named else 'not named'} after {entry['seconds']:.1f} s"
    return fact(
        mistake.title,
        f"rank {rank} and its line are named before the {timeout_s:g} s of the group's own timeout",
        measured + (f"; no line of {', '.join(missing)}" if missing else ""),
        named and soon,
        command=command,
    )
