"""A device of this machine, checked in minutes: does it train, and compute, what the CPU computes, in the same bytes?

One process on one device: several of them take `verify equal` with hardware.device = "cuda".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fourfold.lab import device_rank
from fourfold.lab.memory import SETTINGS as MEMORY
from fourfold.lab.memory import TOLERANCE, ratio
from fourfold.lab.precision import lab_precision
from fourfold.lab.precision_ranks import course
from fourfold.lab.smoke import smoke, smoke_spec
from fourfold.launch.pool import RankPool
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan, make_run_plan
from fourfold.plan.state_bytes import rank_bytes
from fourfold.record.finding import Finding, document, fact, not_tested, write_findings
from fourfold.record.reader import RunReader
from fourfold.record.run_dir import RunDir
from fourfold.spec.load import load_spec
from fourfold.spec.ready import ready_text
from fourfold.train.precision import lacking
from fourfold.train.start import open_run
from fourfold.verify.equal import verify_equal
from fourfold.verify.out import open_folder, open_room

SCHEMA = "fourfold.lab.device/1"
STEPS = 30  # of a timed run
LATER = 10  # of them from this one on: kernels are loaded, and memory is had, by then
TIMED = (("fp32", ()), ("fp32 in TF32", ("precision.tf32=true",)), ("bf16", ("precision.compute=bf16",)))


@dataclass(slots=True)
class _Check:
    device: str
    folder: RunDir
    command: str
    say: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)

    def plan(self, spec: str, *sets: str) -> RunPlan:
        """A ready Spec on one rank of the device."""
        return make_run_plan(
            load_spec(spec, [f"hardware.device={self.device}", *sets]), 1, tuple(self.command.split())
        )

    def take(self, part: str, found: Mapping[str, Any]) -> None:
        """The findings of another check's document, told as this part's."""
        for entry in found["findings"]:
            finding = Finding.model_validate(entry)
            self.findings.append(finding.model_copy(update={"claim": f"{part}: {finding.claim}"}))
        self.say(f"{part}: {found['verdict']}")


def lab_device(
    device: str,
    *,
    out: Path | None = None,
    command: str = "fourfold lab device",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train, save and resume on one `device` ("cuda", or "cpu" to try the check itself); then look at it closely.

    fp64 against a textbook loop on the CPU, on the adversarial batch; every precision; bytes of state against the
    prediction; the time of a step. out: folder for the findings (default: the next free runs/verify-lab-<n>). say:
    takes each line of the story. Returns the document fourfold.lab.device/1. Without such a device nothing is checked:
    its verdict is "open", and says why.
    """
    facts: dict[str, Any] = {"device": device, "device_name": _name(device)}
    if (missing := why_not(device)) is not None:
        skipped = not_tested("training on a CUDA device", missing, "make gpu-check on a machine with one")
        return document(SCHEMA, [skipped], **facts) | {"verdict": "open"}
    with open_folder(out, "lab") as results, open_room(results, "lab-device") as folder:
        check = _Check(device, RunDir(folder), command, say)
        check.take("training", _trained(check))
        plan = check.plan("tiny")
        equal = f"fourfold verify equal tiny --world 1 --adversarial --set hardware.device={device}"
        check.take("fp64", verify_equal(plan.spec, 1, adverse=True, out=folder, command=equal))
        check.take("precision", lab_precision(out=folder, device=device))
        facts["memory"] = _memory(check)
        facts["step"] = _times(check)
    path = write_findings(results, "lab-device", check.findings, SCHEMA, **facts)
    return document(SCHEMA, check.findings, **facts, folder=str(folder), findings_file=str(path))


def why_not(device: str) -> str | None:
    """Why nothing can be checked; None where it can."""
    if device == "cpu":
        return None
    if torch.cuda.is_available():
        missing = lacking("bf16", torch.device("cuda", 0))  # TF32 takes the same devices
        return missing and f"{missing}: not every precision that is checked is there"
    built = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{built} is built without CUDA"
    return f"{built}, built for CUDA {torch.version.cuda}, finds no device or no driver"


def _name(device: str) -> str:
    there = device == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(0) if there else "the CPU" if device == "cpu" else ""


def _trained(check: _Check) -> dict[str, Any]:
    """The launcher's own ranks, so with NCCL on a CUDA device: three steps, saved, resumed."""
    sets = [f"hardware.device={check.device}", f'run.dir="{check.folder.path / "training"}"']
    loaded, changes = smoke_spec(load_spec("tiny", sets))
    plan = make_run_plan(loaded, 1, tuple(check.command.split()))
    with StopRequest() as stop:
        command = f"fourfold train tiny --smoke --set hardware.device={check.device}"
        return smoke(plan, loaded.text, stop, changes=changes, command=command, say=lambda _: None)


def _memory(check: _Check) -> dict[str, Any]:
    """Bytes of state at three instants, counted from storages, against the prediction; what the allocator took."""
    plan = check.plan("tiny", *MEMORY)
    with RankPool(1, device=check.device) as pool:
        held, peak = pool.run(device_rank.held, plan.spec)[0]
    predicted = rank_bytes(plan.spec, 0)
    assert predicted is not None, "shapes of a decoder are known"
    gaps = [
        (abs(ratio(held.at[instant][category], count) - 1.0), f"{category} {instant}")
        for instant, counts in predicted.items()
        for category, count in counts.items()
    ]
    gap, where = max(gaps)
    check.findings.append(
        fact(
            "memory: the device holds the state that was predicted, in each category at each instant",
            f"{len(gaps)} byte counts, each within {TOLERANCE:.0%} of its prediction",
            f"the widest gap is {gap:.2%}" + (f": {where}" if gap else ""),
            gap <= TOLERANCE,
            command=check.command,
        )
    )
    end = sum(held.at["after the step"].values())
    check.say(f"memory: {end:,} bytes of state after the step, {gap:.2%} at most from the prediction")
    return {"state_bytes": end, "activation_bytes": held.activations, "peak_allocated_bytes": peak}


def _times(check: _Check) -> list[dict[str, Any]]:
    """The step time of `small`, by precision; there is no prediction to hold it against yet."""
    entries: list[dict[str, Any]] = []
    with RankPool(1, device=check.device) as pool:
        for title, sets in TIMED:
            if check.device == "cpu" and title == "fp32 in TF32":
                continue
            more = (
                f"run.steps={STEPS}",
                "run.log_every=1",
                "run.validate_every=0",
                "run.validation_batches=1",
            )
            folder = check.folder.path / f"step-{len(entries)}"
            plan = check.plan("small", f'run.dir="{folder}"', *more, *sets)
            pool.run(course, plan, open_run(plan, ready_text("small")).path, "")
            lines = [line for line in RunReader(folder).metrics() if "loss" in line]
            entries.append({"title": title, **_entry(lines)})
            check.say(f"step of small in {title}: {entries[-1]['step_s'] * 1e3:.1f} ms")
    fell = all(entry["fell"] for entry in entries)
    measured = "; ".join(
        f"{entry['title']} {entry['step_s'] * 1e3:.1f} ms, {entry['tokens_per_s']:,.0f} tokens/s"
        for entry in entries
    )
    check.findings.append(
        fact(
            f"step: small trains {STEPS} steps in each precision, and its loss falls",
            "a lower loss at the end",
            measured,
            fell,
            command=check.command,
        )
    )
    check.findings.append(
        not_tested(
            "step: its time is as predicted",
            "step times are not predicted yet",
            "a plan that predicts them for this device",
        )
    )
    return entries


def _entry(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    losses = [float(line["loss"]) for line in lines]
    return {
        "step_s": median(float(line["step_s"]) for line in lines[LATER:]),
        "tokens_per_s": median(float(line["tokens_per_s"]) for line in lines[LATER:]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "fell": sum(losses[-5:]) < sum(losses[:5]),
    }
