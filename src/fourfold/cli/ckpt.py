"""`fourfold ckpt`: what a checkpoint holds, whether it is whole, and which ones may go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from cyclopts import App

from fourfold.cli.output import next_command, print_document, table
from fourfold.spec.errors import EXIT_DONE, EXIT_UNREADABLE

if TYPE_CHECKING:
    from fourfold.checkpoint.retention import PrunePlan
    from fourfold.record.finding import Finding, Verdict

VALIDATE_SCHEMA = "fourfold.ckpt.validate/1"
PRUNE_SCHEMA = "fourfold.ckpt.prune/1"

app = App(
    name="ckpt",
    help="""Look into checkpoints: what they hold, whether they are whole, which may go.

For example:

    fourfold ckpt inspect runs/tiny-1
    fourfold ckpt validate runs/tiny-1/ckpt/step-00000010
    fourfold ckpt prune runs/tiny-1 --keep-last 3 --dry-run
""",
)


@app.command
def inspect(path: Path, /, *, json: bool = False) -> int:
    """Print what a checkpoint holds: step, position, layout, versions, tensors. Only its manifest is read.

    Examples:

        fourfold ckpt inspect runs/tiny-1
        fourfold ckpt inspect runs/tiny-1/ckpt/step-00000010
        fourfold ckpt inspect runs/tiny-1 --json

    Parameters
    ----------
    path
        A checkpoint; or a run directory or its ckpt folder: then the newest by its own step.
    json
        Print one JSON document on stdout.
    """
    from fourfold.checkpoint.inspect import checkpoints_at, describe

    described = describe(checkpoints_at(path)[0])
    if json:
        print_document(described)
    else:
        _print_description(described)
    next_command(f"fourfold ckpt validate {quote(described['path'])}")
    return EXIT_DONE


@app.command
def validate(path: Path, /, *, json: bool = False) -> int:
    """Check a checkpoint whole: its manifest, every file's size and hash, every tensor's place. Damaged: exit 5.

    Examples:

        fourfold ckpt validate runs/tiny-1
        fourfold ckpt validate runs/tiny-1/ckpt/step-00000010
        fourfold ckpt validate runs/tiny-1 --json

    Parameters
    ----------
    path
        A checkpoint; or a run directory or its ckpt folder: then the newest by its own step, and every folder there
        whose step cannot be told.
    json
        Print one JSON document on stdout: verdict and findings; `instead` is the valid one in place of a damaged one.
    """
    from fourfold.checkpoint.choose import newest_valid
    from fourfold.checkpoint.inspect import checkpoints_at
    from fourfold.record.finding import document

    folders = checkpoints_at(path)
    findings = [finding for folder in folders for finding in _findings(folder)]
    failed = any(finding.verdict == "fail" for finding in findings)
    beside = folders[0].parent if folders[0].name else folders[0].absolute().parent
    instead = newest_valid(beside).path if failed else None
    told = {"path": str(folders[0]), "instead": str(instead) if instead else None}
    if json:
        print_document(document(VALIDATE_SCHEMA, findings, **told))
    else:
        print(f"{'fail' if failed else 'pass'}: {', '.join(str(folder) for folder in folders)}\n")
        print(table(("", "claim"), [(finding.verdict, _line(finding)) for finding in findings]))
        if failed:
            print(f"\n--resume takes {instead or 'none: no checkpoint beside it is valid'}")
    if not failed or instead:
        next_command(f"fourfold ckpt inspect {quote(str(instead or folders[0]))}")
    return EXIT_UNREADABLE if failed else EXIT_DONE


@app.command
def prune(
    path: Path,
    /,
    *,
    keep_last: int,
    keep_every: int = 0,
    keep_every_s: float = 0.0,
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Remove old checkpoints, and what dead saves left; never the newest valid one, and no damaged one.

    Examples:

        fourfold ckpt prune runs/tiny-1 --keep-last 3 --dry-run
        fourfold ckpt prune runs/tiny-1 --keep-last 3 --keep-every 1000
        fourfold ckpt prune runs/tiny-1/ckpt --keep-last 1 --keep-every-s 3600 --json

    Parameters
    ----------
    path
        A run directory, or its ckpt folder.
    keep_last
        So many of the newest stay, counted by their own steps; at least 1.
    keep_every
        Steps that are multiples of this stay too.
    keep_every_s
        Of each span of so many seconds the first that was saved in it stays too.
    dry_run
        Print what would go, and stop.
    json
        Print one JSON document on stdout.
    """
    from fourfold.checkpoint.inspect import ckpt_dir_of
    from fourfold.checkpoint.retention import execute, plan_prune

    plan = plan_prune(ckpt_dir_of(path), keep_last, keep_every, keep_every_s)
    removed = () if dry_run else execute(plan)
    if json:
        told = {"dry_run": dry_run, "removed": [str(folder) for folder in removed]}
        print_document({"schema": PRUNE_SCHEMA, **plan.model_dump(mode="json"), **told})
    else:
        _print_plan(plan, None if dry_run else len(removed))
    if dry_run and plan.going:
        every = f" --keep-every {keep_every}" if keep_every else ""
        every += f" --keep-every-s {keep_every_s:g}" if keep_every_s else ""
        next_command(f"fourfold ckpt prune {quote(str(path))} --keep-last {keep_last}{every}")
    elif plan.newest_valid:
        next_command(f"fourfold ckpt inspect {quote(plan.newest_valid)}")
    return EXIT_DONE


def _findings(folder: Path) -> list[Finding]:
    """One finding for each claim about a checkpoint that holds, one for each problem of those that do not."""
    from fourfold.checkpoint.validate import CLAIMS, examine

    checks = examine(folder)
    findings = []
    for claim in CLAIMS:
        if claim not in checks:
            findings.append(_finding(folder, claim, "open", "not checked: no whole manifest"))
        elif not checks[claim]:
            findings.append(_finding(folder, claim, "pass", "so it is"))
        else:
            told = [f"{problem.asked}: {problem.found}" for problem in checks[claim]]
            findings += [_finding(folder, claim, "fail", measured) for measured in told]
    return findings


def _finding(folder: Path, claim: str, verdict: Verdict, measured: str) -> Finding:
    from fourfold.record.finding import Finding

    command = f"fourfold ckpt validate {quote(str(folder))}"
    return Finding(
        claim=f"{folder.name}: {claim}",
        kind="open" if verdict == "open" else "fact",
        expected=claim,
        measured=measured,
        verdict=verdict,
        evidence=str(folder),
        command=command,
        would_test=f"{command}, once its manifest is whole" if verdict == "open" else "",
    )


def _line(finding: Finding) -> str:
    return finding.claim if finding.verdict == "pass" else f"{finding.claim}: {finding.measured}"


def _print_description(told: dict[str, Any]) -> None:
    layout = ", ".join(f"{key} {value}" for key, value in told["layout"].items())
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(told["created"]))
    rows = [
        ("step", f"{told['step']:,}, after {told['position']:,} samples"),
        ("world", f"{told['world']} ranks; {layout}"),
        ("saved", f"{saved} by {versions}"),
        ("size", f"{_size(told['bytes'])} in {len(told['files'])} files"),
        ("spec hash", told["spec_hash"]),
        ("data hash", told["data_hash"]),
    ]
    print(table(("path", told["path"]), rows))
    print()
    print(table(("dtype", "chunks", "size", "tensor"), [_tensor_row(row) for row in told["tensors"]]))


def _tensor_row(row: dict[str, Any]) -> Sequence[str]:
    size = "n/a" if row["bytes"] is None else _size(row["bytes"])
    return (row["dtype"], str(row["chunks"]), size, f"{row['name']} {row['shape']}")


def _print_plan(plan: PrunePlan, removed: int | None) -> None:
    rows = [
        (
            folder.action,
            "n/a" if folder.step is None else str(folder.step),
            _size(folder.bytes),
            f"{Path(folder.path).name}: {folder.why}",
        )
        for folder in plan.folders
    ]
    print(table(("", "step", "size", "folder"), rows))
    freed = _size(sum(folder.bytes for folder in plan.going))
    done = f"{len(plan.going)} would go ({freed})" if removed is None else f"{removed} removed"
    print(f"\n{plan.ckpt_dir}: {done}, of {len(plan.folders)}")


def _size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
