"""`fourfold train --smoke`: three steps, saved, resumed and proved, before the long run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from shlex import join
from typing import TYPE_CHECKING

from fourfold.cli.output import next_command, paint, print_document, print_error, story
from fourfold.cli.verify import findings_table
from fourfold.spec.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_KILLED_BASE, Problem, SpecError

if TYPE_CHECKING:
    from fourfold.launch.rank import Rank


def smoke_run(
    spec: str,
    nproc: int,
    sets: Sequence[str],
    *,
    resume: str,
    max_restarts: int,
    dry_run: bool,
    json: bool,
    rank: Rank | None,
) -> int:
    """What `train` does with `--smoke`; its parameters are those of `train`. rank: this process's, under torchrun."""
    from fourfold.launch.stop import StopRequest
    from fourfold.plan.run_plan import make_run_plan
    from fourfold.spec.load import load_spec
    from fourfold.spec.rules import require

    settings = [word for setting in sets for word in ("--set", setting)]
    in_full = join(["fourfold", "train", spec, "--nproc", str(nproc), *settings])
    command = f"{in_full} --smoke"
    _check_alone(command, resume, max_restarts, rank)
    # from before torch is imported, which takes a while; what starts nothing just ends at a signal
    with nullcontext(StopRequest()) if dry_run else StopRequest() as stop:
        from fourfold.lab.smoke import Stopped, smoke, smoke_spec

        loaded, changes = smoke_spec(load_spec(spec, sets, nproc))
        plan = make_run_plan(loaded, nproc, ("fourfold", *sys.argv[1:]))
        require(plan.spec, "train", loaded.provenance)
        for change in changes:
            story(f"for the smoke test: {change}")
        if dry_run:
            from fourfold.train.rehearsal import foreseen

            plan = foreseen(plan)
            if json:
                print_document(plan.model_dump(mode="json"))
            else:
                print(plan)
                next_command(command)
            return EXIT_DONE
        try:
            document = smoke(plan, loaded.text, stop, changes=changes, command=command, say=story)
        except Stopped as stopped:
            story("stopped by a signal: the smoke test has shown nothing")
            code = EXIT_KILLED_BASE + stopped.number
            if json:
                why = "a smoke test that was broken off has shown nothing"
                print_error(command, code, [Problem(command, str(stopped), why, command)])
            return code
    passed = document["verdict"] == "pass"
    if json:
        print_document(document)
    else:
        print(findings_table(document["findings"]))
        verdict = paint(document["verdict"], "green" if passed else "red", sys.stdout)
        print(f"\n{verdict}  {document['run']}")
    for finding in document["findings"]:
        if finding["verdict"] == "fail":
            story(f"failed: {finding['claim']}: {finding['measured']}")
    next_command(in_full if passed else f"fourfold report {document['run']}")
    return EXIT_DONE if passed else EXIT_CHECK_FAILED


def _check_alone(command: str, resume: str, max_restarts: int, rank: Rank | None) -> None:
    """It begins anew, here, and a failure is its result: all that would have it otherwise, at once."""
    odd = []
    if rank is not None:
        found = "a rank that torchrun has started"
        why = "it starts its ranks twice, the second time in fresh processes: torchrun starts them once"
        odd.append(Problem("--smoke under torchrun", found, why, command))
    if resume != "never":
        found = "a run to go on with"
        why = "a smoke test begins in a run directory of its own, and resumes by itself"
        odd.append(Problem(f"--smoke with --resume {resume}", found, why, command))
    if max_restarts:
        found = "ranks that would be started again"
        why = "a rank that fails in three steps is what a smoke test is there to show"
        odd.append(Problem(f"--smoke with --max-restarts {max_restarts}", found, why, command))
    if odd:
        raise SpecError(odd)
