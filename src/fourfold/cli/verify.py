"""`fourfold verify`: a layout, or a run, against what it claims."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join, quote
from typing import Annotated, Any

from cyclopts import App, Parameter

from fourfold.cli.output import next_command, paint, print_document, story, table
from fourfold.spec.errors import EXIT_CHECK_FAILED, EXIT_DONE, Problem, SpecError
from fourfold.spec.words import counted

app = App(
    name="verify",
    help="""Prove a run right: every sample exactly once, equal to one device, the same when it goes on after a kill.

    For example:

        fourfold verify coverage tiny --world 3
        fourfold verify equal tiny --world 4
        fourfold verify resume tiny --world 2
    """,
)

Sets = Annotated[tuple[str, ...], Parameter(name="--set")]


@app.command
def coverage(
    spec: str,
    /,
    *,
    world: int | None = None,
    epochs: int = 2,
    max_steps: int | None = None,
    sets: Sets = (),
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Count every sample that every rank is given: none twice, none missing, the order new in every epoch.

    With a Spec, real ranks read whole epochs and the validation set, without training. With a run directory, what
    its ranks wrote down while they trained is counted.

    Examples:

        fourfold verify coverage tiny --world 3
        fourfold verify coverage my.toml --world 4 --max-steps 1000
        fourfold verify coverage runs/tiny-1 --json

    Parameters
    ----------
    spec
        A TOML file, the name of a ready Spec, or a run directory.
    world
        Ranks in all (default 2).
    epochs
        Epochs to read.
    max_steps
        Stop after so many steps: quicker, and proves less.
    sets
        One setting, a.b=value in TOML, over the file; may be repeated.
    out
        A folder for the findings (default: the next free runs/verify-NAME-N; of a run, its own).
    json
        Print one JSON document.
    """
    from fourfold.spec.ready import ready_names
    from fourfold.verify.coverage import run_coverage, verify_coverage

    command = _command("coverage", spec, sets, world=world, epochs=epochs, max_steps=max_steps)
    if Path(spec).is_dir() and spec not in ready_names():
        if world is not None or max_steps is not None or sets:
            raise SpecError(_run_is_given(spec))
        document = run_coverage(Path(spec), out=out, command=f"fourfold verify coverage {quote(spec)}")
        return _end(document, json, f"fourfold report {quote(spec)}")
    from fourfold.spec.load import load_spec

    loaded = load_spec(spec, sets, world)
    ranks = 2 if world is None else world
    story(
        f"{loaded.spec.name}: {counted(ranks, 'rank')} read{'s' if ranks == 1 else ''} what would be trained on"
    )
    document = verify_coverage(
        loaded.spec, ranks, epochs=epochs, max_steps=max_steps, out=out, command=command
    )
    return _end(document, json, _command("equal", spec, sets, world=ranks))


@app.command
def equal(
    spec: str,
    /,
    *,
    world: int,
    steps: int | None = None,
    adversarial: bool = False,
    all_layouts: Annotated[bool, Parameter(name="--all", negative="")] = False,
    sets: Sets = (),
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Compare ranks with one device, in fp64: every loss, gradient, norm, and parameter after some steps.

    The data is the Spec's own, made uneven: targets are masked so that every rank has another number of them.
    Clipping and accumulation are on. Each rank compares what it holds; nothing is gathered. If something differs, the
    first deviating value in execution order is named, with the mesh axis whose collective stands before it.

    Examples:

        fourfold verify equal tiny --world 2
        fourfold verify equal tiny --world 4 --set layout.tp=2 --adversarial
        fourfold verify equal tiny --world 4 --all

    Parameters
    ----------
    spec
        A TOML file, or the name of a ready Spec.
    world
        Ranks in all.
    steps
        Optimizer steps (default 5; with --all 3).
    adversarial
        Make the Spec's decoder and data adversarial: ties, biases, dropout, a frozen and a sometimes-used parameter,
        two documents a row or more, padding.
    all_layouts
        Judge every product of degrees that many ranks allow, with the lowest and the highest zero, and as many more
        layouts as it takes that every two settings meet (schedules, methods of cp, sp, zero, recompute, microbatches);
        on a small adversarial model.
    sets
        One setting, a.b=value in TOML, over the file; may be repeated.
    out
        A folder for the findings (default: the next free runs/verify-NAME-N); may be a run's.
    json
        Print one JSON document.
    """
    from fourfold.spec.layouts import NOT_READ
    from fourfold.spec.load import load_spec

    loaded = load_spec(spec, (*sets, *NOT_READ) if all_layouts else sets, world)
    steps = steps if steps is not None else 3 if all_layouts else 5
    alone = _command("equal", spec, (), world=world, steps=steps)
    if all_layouts:
        from fourfold.verify.every_layout import verify_every_layout

        document = verify_every_layout(
            loaded.spec,
            world,
            steps=steps,
            out=out,
            command=f"{alone} --all{_sets(sets)}",
            repeat=lambda of_layout: f"{alone} --adversarial{_sets((*sets, *of_layout))}",
            say=story,
        )
    else:
        from fourfold.verify.equal import verify_equal

        command = alone + " --adversarial" * adversarial + _sets(sets)
        document = verify_equal(
            loaded.spec, world, steps=steps, adverse=adversarial, out=out, command=command, say=story
        )
    for change in document["changes"]:
        story(f"for the check: {change}")
    return _end(document, json, f"fourfold train {quote(spec)} --nproc {world}{_sets(sets)}")


@app.command
def exact(
    spec: str,
    /,
    *,
    world: int,
    steps: int = 20,
    sets: Sets = (),
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Train on 1, 2, 4, ... ranks in exact mode, at every stage of ZeRO, and compare every bit with one rank.

    Compared are the losses, gradients, norms and parameters of every step and the whole state after the last, by
    SHA-256. If something differs, the first value in order of execution is named.

    Examples:

        fourfold verify exact tiny --world 2
        fourfold verify exact tiny --world 8 --set precision.compute=bf16
        fourfold verify exact my.toml --world 4 --steps 5 --json

    Parameters
    ----------
    spec
        A TOML file, or the name of a ready Spec.
    world
        The largest number of ranks, a power of two.
    steps
        Optimizer steps.
    sets
        One setting, a.b=value in TOML, over the file; may be repeated.
    out
        A folder for the findings (default: the next free runs/verify-NAME-N); may be a run's.
    json
        Print one JSON document.
    """
    from fourfold.spec.load import load_spec
    from fourfold.verify.exact import verify_exact

    loaded = load_spec(spec, sets)
    command = _command("exact", spec, sets, world=world, steps=steps)
    document = verify_exact(loaded.spec, world, steps=steps, out=out, command=command, say=story)
    settings = _sets((*(one for one in sets if not one.startswith("run.exact=")), "run.exact=true"))
    return _end(document, json, f"fourfold train {quote(spec)} --nproc {world}{settings}")


@app.command
def resume(
    spec: str,
    /,
    *,
    world: int,
    sets: Sets = (),
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Kill and stop a run, let fresh processes go on with it, and hold it against the undisturbed one, bit for bit.

    The run is the Spec's, cut short to a few epochs of a few steps. It is killed twice in one epoch, killed in a save
    (back to the checkpoint at an epoch's edge, with loader workers), and stopped by a signal. Compared are sample ids,
    learning rates, losses, gradient norms, validations and every tensor of every checkpoint, the random streams of
    every rank too. If something differs, the first deviating value is named, and what it may come from.

    Examples:

        fourfold verify resume tiny --world 2
        fourfold verify resume tiny --world 1 --json
        fourfold verify resume my.toml --world 4 --set precision.compute=bf16

    Parameters
    ----------
    spec
        A TOML file, or the name of a ready Spec.
    world
        Ranks in all.
    sets
        One setting, a.b=value in TOML, over the file; may be repeated.
    out
        A folder for the findings and the runs (default: the next free runs/verify-NAME-N).
    json
        Print one JSON document.
    """
    from fourfold.record.run_dir import next_free
    from fourfold.spec.load import load_spec
    from fourfold.verify.out import RUNS
    from fourfold.verify.resume import verify_resume

    loaded = load_spec(spec, sets, world)
    command = _command("resume", spec, sets, world=world)
    document = verify_resume(loaded.spec, world, out=out, command=command, say=story)
    for change in document["changes"]:
        story(f"for the check: {change}")
    free, saves = next_free(RUNS, loaded.spec.name), loaded.spec.checkpoint
    saving = (
        () if saves.every or saves.every_s else (f"checkpoint.every={max(1, loaded.spec.run.steps // 10)}",)
    )
    settings = _sets((*sets, *saving, f"run.dir={free}"))
    return _end(document, json, f"fourfold train {quote(spec)} --nproc {world}{settings} --resume auto")


def _end(document: Mapping[str, Any], json: bool, then: str) -> int:
    """Print the document or its table, and the next command; the exit code says whether all checks held."""
    passed = document["verdict"] == "pass"
    if json:
        print_document(document)
    else:
        findings = document["findings"]
        if "count" in document:  # one finding and one line for each layout come first
            print(layouts_table(document["layouts"]) + "\n")
            of_layouts = {layout["words"] for layout in document["layouts"] if layout["verdict"] == "pass"}
            findings = [finding for finding in findings if finding["claim"] not in of_layouts]
            refused = [f"{family['family']} ({family['rule']})" for family in document["refused"]]
            story("refused: " + ("; ".join(refused) or "none"))
        print(findings_table(findings))
        verdict = paint(document["verdict"], "green" if passed else "red", sys.stdout)
        print(f"\n{verdict}  {document['findings_file']}")
    if passed:
        next_command(then)
        return EXIT_DONE
    failed = [finding for finding in document["findings"] if finding["verdict"] == "fail"]
    for finding in failed if json else ():  # the table has told them
        story(f"failed: {finding['claim']}: {finding['measured']}")
    if failed[0]["command"]:
        next_command(failed[0]["command"])
    return EXIT_CHECK_FAILED


def layouts_table(layouts: Sequence[Mapping[str, Any]]) -> str:
    """Layouts in at most 80 columns: the verdict, the worst gap, the seconds that it took, and the layout."""
    rows = [(one["verdict"], _worst(one), f"{one['seconds']:.1f}", one["words"]) for one in layouts]
    return table(("verdict", "worst", "seconds", "layout"), rows)


def _worst(layout: Mapping[str, Any]) -> str:
    return "-" if layout["verdict"] == "refused" else f"{layout['worst_relative']:.2g}"


def findings_table(findings: Sequence[Mapping[str, Any]]) -> str:
    """Findings in at most 80 columns: the verdict, then the claim, what was measured and within which bound."""
    rows = []
    for finding in findings:
        text = f"{finding['claim']}: {finding['measured']}"
        if finding["tolerance"]:
            text += f" (within {finding['tolerance']})"
        rows.append((finding["verdict"], text))
    return table(("verdict", "finding"), rows)


def _command(verb: str, spec: str, sets: Sequence[str], **options: int | None) -> str:
    words = ["fourfold", "verify", verb, spec]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return join(words) + _sets(sets)


def _sets(sets: Sequence[str]) -> str:
    return "".join(f" --set {quote(setting)}" for setting in sets)


def _run_is_given(run: str) -> Problem:
    return Problem(
        asked=f"coverage of {run} with --world, --max-steps or --set",
        found="a run directory",
        why="its ranks, steps and settings are what they were",
        instead=f"fourfold verify coverage {quote(run)}",
    )
