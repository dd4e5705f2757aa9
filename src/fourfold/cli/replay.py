"""`fourfold replay`: the step of a failure bundle, again, on one device."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from fourfold.cli.output import print_document, story
from fourfold.spec.errors import DataError, Problem


def replay(bundle: Path, /, *, json: bool = False) -> int:
    """Run the step of a failure bundle again, on one device, and name the first module that is not finite.

    Examples:

        fourfold replay runs/tiny-1/failures/step-000005-rank1
        fourfold replay runs/tiny-1/failures/step-000005-rank1 --json
        fourfold replay runs/tiny-1

    Parameters
    ----------
    bundle
        A folder that a failed run left under `failures`; or the run directory, if it left one only.
    json
        Print one JSON document on stdout.
    """
    folder = bundle_at(bundle)
    from fourfold.train.replay import replay as run_again

    document = run_again(folder)
    if json:
        print_document(document)
        return 0
    print(f"step {document['step']} of rank {document['rank']}, again on one device")
    for row in document["microbatches"]:
        other = "" if row["targets"] == row["valid_targets"] else f" of {row['valid_targets']} valid"
        print(
            f"  microbatch {row['microbatch']:>3}  loss sum {row['loss_sum']:<14.6g} targets {row['targets']}{other}"
        )
    print(f"gradient norm of these microbatches: {document['grad_norm']:.6g}")
    print(f"first value that is not finite: {document['first_nonfinite'] or 'none'}")
    if document["error"]:
        print(f"raised: {document['error']}")
    print(f"the failure came again: {'yes' if document['reproduced'] else 'no'}")
    story(f"recorded then: {document['recorded_error'].splitlines()[0]}")
    return 0


def bundle_at(path: Path) -> Path:
    """The bundle that a path means: itself, or the only one of a run directory, which is said.

    Raises DataError for what is neither, and for a run directory with none, or with several: it names them, and for the
    next command that of the rank that failed first.
    """
    from fourfold.diagnose.bundles import bundle_of_failure, bundles
    from fourfold.record.run_dir import RunDir

    run = RunDir(path)
    if (path / "bundle.json").exists():
        return path
    if not run.is_run:
        raise DataError(_no_bundle(path))
    found = bundles(run)
    if len(found) == 1:
        story(f"the only failure bundle of {path}: {found[0]}")
        return found[0]
    asked = f"the failure bundle of {path}"
    if not found:
        none = (
            "a rank leaves one when its own step raises an error; not when it is killed, or loses the others"
        )
        raise DataError(
            Problem(asked, "a run directory without one", none, f"fourfold report {quote(str(path))}")
        )
    first = bundle_of_failure(run) or found[-1]
    there = ", ".join(folder.name for folder in found)
    named = f"fourfold replay {quote(str(first))}"
    if bundle_of_failure(run):
        named += "  (the rank that failed first)"
    raise DataError(Problem(asked, f"{len(found)}: {there}", "one step of one rank is run again", named))


def _no_bundle(path: Path) -> Problem:
    from fourfold.diagnose.bundles import bundles
    from fourfold.record.run_dir import RunDir, nearest_run

    if path.is_dir():
        found = "a folder without bundle.json"
    else:
        found = "a file, not a folder" if path.exists() else "nothing has that name"
    near = nearest_run(path)
    there = bundles(RunDir(near)) if near else ()
    return Problem(
        asked=f"the failure bundle {path}",
        found=found,
        why="a rank whose own step raises an error leaves one in its run: RUN/failures/step-…-rank…",
        instead=f"fourfold replay {quote(str(there[-1]))}"
        if there
        else "the path of one, or of a run that has one",
    )
