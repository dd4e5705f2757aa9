"""`fourfold ckpt`: what a checkpoint holds, whether it is whole, and which ones may go."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from cyclopts import App

from fourfold.cli.ckpt_shown import description_shown, listing_shown, size
from fourfold.cli.output import next_command, print_document, table
from fourfold.spec.errors import EXIT_DONE, EXIT_UNREADABLE, Problem, SpecError

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
def inspect(path: Path, /, *, tensors: bool = False, json: bool = False) -> int:
    """Print what a checkpoint holds, or which checkpoints a run has. Manifests and sizes are read, no tensor is.

    Examples:

        fourfold ckpt inspect runs/tiny-1
        fourfold ckpt inspect runs/tiny-1/ckpt/step-00000010 --tensors
        fourfold ckpt inspect runs/tiny-1 --json

    Parameters
    ----------
    path
        A run directory or its ckpt folder: all that lies there. Or a checkpoint: what is in it.
    tensors
        List the tensors of a checkpoint, too.
    json
        Print one JSON document on stdout.
    """
    from fourfold.checkpoint.inspect import checkpoints_at, ckpt_dir_of, describe
    from fourfold.checkpoint.listing import list_checkpoints
    from fourfold.checkpoint.manifest import MANIFEST

    listing = None if (path / MANIFEST).exists() else list_checkpoints(ckpt_dir_of(path))
    if listing is not None and listing.entries:
        newest = listing.newest_valid
        if tensors:
            raise SpecError(_tensors_of_many(path, newest))
        if json:
            print_document(listing.document())
        else:
            print(listing_shown(listing))
        next_command(
            *(f"fourfold ckpt inspect {quote(one)}" for one in (newest,) if one),
            f"fourfold ckpt validate {quote(str(path))}",
        )
        return EXIT_DONE
    described = describe(checkpoints_at(path)[0])
    if json:
        print_document(described)
    else:
        print(description_shown(described, tensors))
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
        fourfold ckpt prune runs/tiny-1/ckpt --keep-last 1 --keep-every-s 3600

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


def _tensors_of_many(path: Path, newest: str | None) -> Problem:
    return Problem(
        asked=f"--tensors of {path}",
        found="a folder of checkpoints",
        why="tensors are listed of one checkpoint",
        instead=f"fourfold ckpt inspect {quote(newest)} --tensors" if newest else "the path of a checkpoint",
    )


def _print_plan(plan: PrunePlan, removed: int | None) -> None:
    rows = [
        (
            folder.action,
            "n/a" if folder.step is None else str(folder.step),
            size(folder.bytes),
            f"{Path(folder.path).name}: {folder.why}",
        )
        for folder in plan.folders
    ]
    print(table(("", "step", "size", "folder"), rows))
    freed = size(sum(folder.bytes for folder in plan.going))
    done = f"{len(plan.going)} would go ({freed})" if removed is None else f"{removed} removed"
    print(f"\n{plan.ckpt_dir}: {done}, of {len(plan.folders)}")
