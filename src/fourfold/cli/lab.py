"""`fourfold lab`: the experiments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from cyclopts import App

from fourfold.cli.output import next_command, paint, print_document, story, wrapped
from fourfold.spec.errors import EXIT_CHECK_FAILED, EXIT_DONE

Lines = Callable[[Mapping[str, Any]], list[str]]

app = App(
    name="lab",
    help="""The experiments and the demonstration.

    For example:

        fourfold lab coverage
        fourfold lab precision
        fourfold lab demo --nproc 4
    """,
)


@app.command
def coverage(*, out: Path | None = None, json: bool = False) -> int:
    """Two ranks print their sample ids: nothing double, nothing missing; then each classic mistake is switched on.

    Examples:

        fourfold lab coverage
        fourfold lab coverage --json
        fourfold lab coverage --out my-lab

    Parameters
    ----------
    out
        A folder for the findings (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.cli.lab_coverage import coverage_lines
    from fourfold.lab.coverage import lab_coverage

    document = lab_coverage(out=out)
    return _shown(document, coverage_lines, json, "fourfold verify coverage tiny --world 2")


def _shown(document: dict[str, Any], lines: Lines, json: bool, next_line: str) -> int:
    """The document, or its lines, and the command that comes next; the exit code by its verdict."""
    if json:
        print_document(document)
    else:
        print("\n".join(lines(document)))
    next_command(next_line)
    return EXIT_DONE if document["verdict"] == "pass" else EXIT_CHECK_FAILED


@app.command
def resume(*, out: Path | None = None, json: bool = False) -> int:
    """A run goes on from step 10 as if nothing had happened; then with each classic mistake, which shows and is caught.

    Steps 11-20 of 20 stand beside those of the undisturbed run. Weights only, the data position lost, the seed set
    again, all ranks writing one file, a success mark before the shards, a damaged shard.

    Examples:

        fourfold lab resume
        fourfold lab resume --json
        fourfold lab resume --out my-lab

    Parameters
    ----------
    out
        A folder for the findings and the runs (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.lab.resume import lab_resume

    document = lab_resume(out=out, say=story)
    return _shown(document, resume_lines, json, "fourfold verify resume tiny --world 2")


def resume_lines(document: Mapping[str, Any]) -> list[str]:
    """Every exercise: what is wrong with it, its steps beside the undisturbed ones, and what the product says."""
    saved = document["saved"]
    lines = [
        f"a small decoder on real text, {document['world']} ranks, {document['steps']} steps, saved at step {saved}:",
        f"the steps after it undisturbed, and again from step {saved} in new processes",
    ]
    for entry in document["exercises"]:
        lines += ["", paint(entry["title"], "bold", sys.stdout), *wrapped(entry["why"], 0)]
        lines += [line for text in entry["seen"] for line in wrapped(text)]
        if entry["rows"]:
            lines.append(" step   undisturbed       resumed  difference  samples")
        for row in entry["rows"]:
            samples = "same" if row["same_samples"] else "others"
            difference = f"{row['difference']:.1e}" if row["difference"] else "0"
            lines.append(
                f" {row['step']:>4}{row['undisturbed']:>14.9f}{row['resumed']:>14.9f}{difference:>12}  {samples}"
            )
        lines += [line for text in entry["fourfold"] for line in wrapped(f"Fourfold: {text}")]
        good = "the same run, to the last bit" if entry["name"] == "right" else "caught"
        lines.append(f" -> {good if entry['verdict'] == 'pass' else f'NOT {good}'}")
    failed = [finding for finding in document["findings"] if finding["verdict"] == "fail"]
    lines += [""] if failed else []
    for finding in failed:
        lines += wrapped(f"failed: {finding['claim']}: {finding['measured']}", 0)
    return [*lines, "", f"{document['verdict']}  {document['findings_file']}", f"runs  {document['runs']}"]


@app.command
def precision(*, out: Path | None = None, json: bool = False) -> int:
    """A small decoder in fp32, bf16 and fp16, with loss scaling and without; then each classic mistake, and its check.

    Losses, memory, what becomes of a gradient, speed here, skipped steps. Clipping before unscaling, .half() on
    everything, an Inf on one rank of two.

    Examples:

        fourfold lab precision
        fourfold lab precision --json
        fourfold lab precision --out my-lab

    Parameters
    ----------
    out
        A folder for the findings and the runs (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.cli.lab_precision import precision_lines
    from fourfold.lab.precision import lab_precision

    document = lab_precision(out=out, say=story)
    return _shown(
        document, precision_lines, json, "fourfold train tiny --nproc 2 --set precision.compute=bf16"
    )


@app.command
def memory(*, nproc: int = 2, out: Path | None = None, json: bool = False) -> int:
    """The state of one model under DDP, ZeRO-1, 2 and 3 and HSDP: predicted, measured, and what the formula leaves out.

    Bytes of parameters, gradients, moments, gathered copies and buffers on real ranks at three instants: after init,
    between microbatches, after the step.

    Examples:

        fourfold lab memory
        fourfold lab memory --nproc 4
        fourfold lab memory --json

    Parameters
    ----------
    nproc
        Ranks to start on this machine; HSDP takes 4.
    out
        A folder for the findings (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.cli.lab_memory import memory_lines
    from fourfold.lab.memory import lab_memory

    command = "fourfold lab memory" + (f" --nproc {nproc}" if nproc != 2 else "")
    document = lab_memory(nproc=nproc, out=out, command=command, say=story)
    return _shown(document, memory_lines, json, "fourfold train tiny --nproc 2 --set layout.zero=3 --dry-run")


@app.command
def tensor(*, nproc: int = 2, out: Path | None = None, json: bool = False) -> int:
    """Column and row parallel, then sequence parallel, on real ranks: every shape and partial sum, both ways.

    Beside each value stands what one device has. Then each classic mistake: an all-reduce left out, forward and
    backward, a bias that counts twice, a norm's gradient that nobody sums; and what `verify equal` says to it.

    Examples:

        fourfold lab tensor
        fourfold lab tensor --nproc 4
        fourfold lab tensor --json

    Parameters
    ----------
    nproc
        Ranks to start on this machine: 2 or 4.
    out
        A folder for the findings (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.cli.lab_tensor import tensor_lines
    from fourfold.lab.tensor import lab_tensor

    command = "fourfold lab tensor" + (f" --nproc {nproc}" if nproc != 2 else "")
    document = lab_tensor(nproc=nproc, out=out, command=command, say=story)
    return _shown(document, tensor_lines, json, "fourfold verify equal tiny --world 2 --set layout.tp=2")


@app.command
def moe(*, nproc: int = 2, out: Path | None = None, json: bool = False) -> int:
    """The way of tokens through expert parallel, on real ranks: to their experts and back, and that of gradients.

    Beside each value stands what one device has. What a capacity drops, who waits, how the load of experts is balanced.
    Then each classic mistake: an order lost, a router cut off, experts counted again, an auxiliary loss of the batch
    or by ranks; and what `verify equal` says to it.

    Examples:

        fourfold lab moe
        fourfold lab moe --nproc 4
        fourfold lab moe --json

    Parameters
    ----------
    nproc
        Ranks to start on this machine: 2 or 4.
    out
        A folder for the findings (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.cli.lab_moe import NEXT, moe_lines
    from fourfold.lab.moe import lab_moe

    command = "fourfold lab moe" + (f" --nproc {nproc}" if nproc != 2 else "")
    document = lab_moe(nproc=nproc, out=out, command=command, say=story)
    return _shown(document, moe_lines, json, NEXT)


@app.command
def pipeline(
    *, nproc: int = 4, microbatches: int | None = None, out: Path | None = None, json: bool = False
) -> int:
    """The bubble of each pipeline schedule: drawn from torch's own order, by formula, and on real ranks that sleep.

    GPipe, 1F1B, LoopedBFS, interleaved 1F1B, interleaved zero bubble, ZB-V, DualPipeV: a row a rank, idle time over
    microbatches, what a rank holds. Then the accident of torch 2.13 with ZeRO-3 under a split backward.

    Examples:

        fourfold lab pipeline
        fourfold lab pipeline --nproc 2 --microbatches 8
        fourfold lab pipeline --json

    Parameters
    ----------
    nproc
        Ranks of the pipeline, 2 to 4, each a process on this machine.
    microbatches
        Of the drawings and of the real steps, at most 32 (default: two a rank).
    out
        A folder for the findings (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.cli.lab_pipeline import pipeline_lines
    from fourfold.lab.pipeline import lab_pipeline

    command = "fourfold lab pipeline" + (f" --nproc {nproc}" if nproc != 4 else "")
    command += "" if microbatches is None else f" --microbatches {microbatches}"
    document = lab_pipeline(nproc=nproc, microbatches=microbatches, out=out, command=command, say=story)
    return _shown(document, pipeline_lines, json, "fourfold layout show --world 8 --set layout.pp=4")


@app.command
def order(*, nproc: int = 2, out: Path | None = None, json: bool = False) -> int:
    """One rank is late, leaves, or calls its collectives in another order, group or shape: it is named, and its line.

    Each mistake is made twice: what torch says of it alone - an error that names nobody, an abort, wrong sums without
    a word - and what fingerprints and watchdog say, which are on in every run.

    Examples:

        fourfold lab order
        fourfold lab order --nproc 4
        fourfold lab order --json

    Parameters
    ----------
    nproc
        Ranks to start on this machine, 2 to 8.
    out
        A folder for the findings (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.cli.lab_order import order_lines
    from fourfold.lab.order import lab_order

    command = "fourfold lab order" + (f" --nproc {nproc}" if nproc != 2 else "")
    document = lab_order(nproc=nproc, out=out, command=command, say=story)
    return _shown(document, order_lines, json, "fourfold train tiny --nproc 2")


@app.command
def device(*, device: Literal["cuda", "cpu"] = "cuda", out: Path | None = None, json: bool = False) -> int:
    """One CUDA device, checked in minutes: trains, resumes, equals the CPU in fp64, holds what is predicted; its speed.

    Where there is none it says why, and ends with exit code 0: nothing has failed, and nothing was shown.

    Examples:

        fourfold lab device
        fourfold lab device --json
        fourfold lab device --device cpu

    Parameters
    ----------
    device
        "cpu" tries the check itself.
    out
        A folder for the findings and the runs (default: the next free runs/verify-lab-N).
    json
        Print one JSON document.
    """
    from fourfold.cli.lab_device import device_lines
    from fourfold.lab.device import lab_device

    command = "fourfold lab device" + (f" --device {device}" if device != "cuda" else "")
    document = lab_device(device, out=out, command=command, say=story)
    if document["verdict"] == "open":
        if json:
            print_document(document)
        story(f"skipped: {document['findings'][0]['measured']}")
        next_command("fourfold lab device --device cpu")
        return EXIT_DONE
    return _shown(document, device_lines, json, f"fourfold train small --set hardware.device={device}")


@app.command
def demo(*, nproc: int = 2, json: bool = False) -> int:
    """Train a small decoder on real text on local ranks, prove the run right, and write its report.

    Examples:

        fourfold lab demo
        fourfold lab demo --nproc 4
        fourfold lab demo --json

    Parameters
    ----------
    nproc
        Ranks to start on this machine.
    json
        Print one JSON document.
    """
    from fourfold.lab.demo import SETTINGS, demonstrate, plan_for
    from fourfold.train.start import open_run

    plan, text = plan_for(nproc)
    run = open_run(plan, text)
    story(f"run directory {run.path}")
    result = demonstrate(plan, run, SETTINGS, story)
    document = {
        "schema": "fourfold.lab.demo/1",
        "verdict": "pass" if result.passed else "fail",
        "run": str(run.path),
        "report": str(result.report) if result.report else None,
        "exit_code": result.exit_code,
        "findings": [finding.model_dump(mode="json") for finding in result.findings],
    }
    if json:
        print_document(document)
    elif result.report is not None:
        print("\n".join(demo_lines(document)))
        next_command(f"python -m webbrowser {result.report}", "fourfold spec copy small my.toml")
    if result.exit_code != EXIT_DONE:
        return result.exit_code
    return EXIT_DONE if result.passed else EXIT_CHECK_FAILED


def demo_lines(document: Mapping[str, Any]) -> list[str]:
    """How many claims of each kind held, those that did not, and where the report is."""
    findings = document["findings"]
    lines = []
    for kind, word in (("fact", "measured here"), ("inference", "follows from them"), ("open", "not tested")):
        of_kind = [finding for finding in findings if finding["kind"] == kind]
        held = sum(finding["verdict"] == "pass" for finding in of_kind)
        result = (
            f"{held} of {len(of_kind)} hold" if kind != "open" else f"{len(of_kind)}, named in the report"
        )
        lines.append(f"{kind:<10} {result:<22} ({word})")
    lines += [
        f"failed: {finding['claim']}: {finding['measured']}"
        for finding in findings
        if finding["verdict"] == "fail"
    ]
    verdict = paint(document["verdict"], "green" if document["verdict"] == "pass" else "red", sys.stdout)
    return [*lines, f"{verdict}  {document['report']}"]
