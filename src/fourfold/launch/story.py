"""Failures, told to people: the screen, where the cause comes last, and failures.md, where it comes first."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from fourfold.launch.failure import FailureReport
from fourfold.spec.errors import EXIT_KILLED_BASE
from fourfold.spec.words import counted

FAILED, RESTARTED = "# Failed: ", "# Started again since: "  # titles in failures.md
_SIGKILL_CODE = EXIT_KILLED_BASE + signal.SIGKILL


def on_screen(failures: Sequence[FailureReport]) -> str:
    """One line for each consequence, then the cause in full."""
    cause, *others = failures
    lines = [other.headline.partition("\n")[0] for other in reversed(others)]
    return "\n".join([*lines, "First to fail:", _paragraph(cause)])


def in_file(failures: Sequence[FailureReport], command: Sequence[str], world: int, attempt: int = 0) -> str:
    """One attempt's part of failures.md: the cause in full with its traceback, then the others."""
    cause, *others = failures
    which = f" (attempt {attempt})" if attempt else ""
    text = [
        f"{FAILED}{counted(world, 'rank')} of `{' '.join(command)}`{which}",
        "## First to fail",
        _quoted(cause),
    ]
    if others:
        text += ["## After it", *(_quoted(other, with_advice=False) for other in others)]
    return "\n\n".join(text) + "\n"


def _paragraph(failure: FailureReport, with_advice: bool = True) -> str:
    lines = [failure.headline]
    why, instead = _advice(failure) if with_advice else ("", "")
    lines += [f"  why:   {why}"] if why else []
    lines += [f"  file:  {failure.evidence}"] if failure.evidence else []
    lines += [f"  type:  {instead}"] if instead else []
    return "\n".join(lines)


def _quoted(failure: FailureReport, with_advice: bool = True) -> str:
    shown = _paragraph(failure, with_advice)
    if failure.traceback:
        shown += f"\n\n{failure.traceback.rstrip()}"
    return "\n".join(f"    {line}".rstrip() for line in shown.splitlines())


def _advice(failure: FailureReport) -> tuple[str, str]:
    """Why such an end comes about, and what to type next; what a rank said itself needs neither."""
    if failure.kind == "killed" and failure.exit_code == _SIGKILL_CODE:
        return (
            "SIGKILL comes from a person, a scheduler, or the kernel when memory is short",
            "dmesg | tail  (the kernel says there if it was out of memory)",
        )
    if failure.kind == "killed":
        return "a fault in native code, such as ranks that reduce tensors of different shapes", ""
    if failure.kind == "hung":
        return (
            "the other ranks waited for it longer than run.timeout_s allows",
            "--set run.timeout_s=SECONDS  if it was honestly so slow there",
        )
    if failure.kind == "left":
        return "ranks must take the same number of steps and join the same collectives", ""
    if failure.kind == "collective":
        return "no rank has said why it went; on several machines, see the others' failures.md", ""
    return "", ""


def last_lines(path: Path, count: int = 20, since: int = 0) -> str:
    """The end of a rank's output from the byte `since` on; nothing if it has none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(since, path.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])
    except OSError:
        return ""
