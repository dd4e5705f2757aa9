"""All that was asked for, task by task, each result written down as it comes; what is written down is not run again."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutants.checks import CHECKS, COLUMNS, OF_RUN, Asked, Result, as_line, asked_of, scratch
from tests.mutants.kinds import Mutant

Line = dict[str, Any]
LIMITS_S = {"run": 180, "equal": 240, "coverage": 180, "exact": 400, "resume": 900}


@dataclass(frozen=True)
class Task:
    """One check of one run; `who` is a fault's name, or stands for a run without one."""

    who: str
    source: str
    check: str
    asked: Asked


def control_name(mutant: Mutant) -> str:
    """The run without a fault that a mutant is held against: one for all that have its settings."""
    told = repr((mutant.control, mutant.world, mutant.adverse, mutant.steps))
    return "clean " + hashlib.blake2b(told.encode(), digest_size=6).hexdigest()


@cache
def source_of(root: Path) -> str:
    """A digest of the product's sources: what was measured of others is measured again."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((root / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_with(root: Path, mutant: Mutant) -> str:
    """The same with the file that the fault is planted by, and the settings that it is planted under."""
    digest = hashlib.blake2b(
        repr((mutant.sets, mutant.world, mutant.adverse, mutant.steps)).encode(), digest_size=8
    )
    if mutant.planted is not None:
        found = importlib.util.find_spec(mutant.planted.partition(":")[0])
        assert found is not None and found.origin is not None, mutant.planted
        digest.update(Path(found.origin).read_bytes())
    return f"{source_of(root)}-{digest.hexdigest()}"


def commit_of(root: Path) -> str:
    """The commit that is checked out, for people."""
    told = subprocess.run(("git", "rev-parse", "--short", "HEAD"), cwd=root, capture_output=True, text=True)
    return told.stdout.strip()


def tasks_of(root: Path, mutants: Sequence[Mutant], checks: Sequence[str], spec: str) -> Iterator[Task]:
    """Check by check, each run without a fault before the first that is held against it."""
    begun = set()
    for check in checks:
        for mutant in mutants:
            control = control_name(mutant)
            if (check, control) not in begun:
                begun.add((check, control))
                yield Task(control, source_of(root), check, asked_of(mutant, spec, control=True))
            yield Task(mutant.name, source_with(root, mutant), check, asked_of(mutant, spec))


def read_results(path: Path) -> dict[tuple[str, str, str], Line]:
    """The newest line of each (who, source, check)."""
    if not path.exists():
        return {}
    lines = (json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text.endswith("}"))
    return {(line["who"], line["source"], line["check"]): line for line in lines}


def missing(tasks: Iterable[Task], done: Iterable[tuple[str, str, str]]) -> list[Task]:
    """The tasks of which nothing is written down."""
    known = set(done)
    return [task for task in tasks if (task.who, task.source, task.check) not in known]


def run_all(tasks: Sequence[Task], results: Path, commit: str, jobs: int, say: Callable[[str], None]) -> None:
    """Run the tasks, `jobs` at a time, each in a process of its own choice; every result goes to `results` at once."""
    results.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as workers, results.open("a", encoding="utf-8") as file:
        waiting = {workers.submit(done, task): task for task in tasks}
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                task = waiting[future]
                for result in future.result():
                    line = as_line(result, who=task.who, source=task.source, commit=commit)
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    told = f"{result.outcome}{'' if result.step is None else f' in step {result.step}'}"
                    say(f"[{number}/{len(tasks)}] {task.who}, {result.check}: {told}, {result.seconds:.0f} s")
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()  # its ranks end with it
            raise


def done(task: Task) -> list[Result]:
    """What a task's check says; one that fails by itself, or takes too long, says so."""
    found: list[Result] = []
    limit_s = LIMITS_S[task.check]
    with scratch() as folder, _at_most(limit_s):
        try:
            found.extend(CHECKS[task.check](task.asked, folder))
        except _TooLong:
            found.append(Result(task.check, "hang", told=f"nothing after {limit_s} s", seconds=limit_s))
        except Exception as error:  # of the check, in this process
            found.append(Result(task.check, "crash", told=f"{type(error).__name__}: {error}"[:300]))
    beyond = OF_RUN[len(found) :] if task.check == "run" else ()
    return found + [Result(check, "not applicable", told="the run did not come so far") for check in beyond]


class _TooLong(Exception):
    pass


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def columns_of(check: str) -> tuple[str, ...]:
    """The columns of the table that a check fills."""
    return OF_RUN if check == "run" else (check,)


assert set(COLUMNS) == {column for check in CHECKS for column in columns_of(check)}
