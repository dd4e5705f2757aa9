"""The precision exercise: one small decoder in fp32, bf16 and fp16, with loss scaling and without; then the mistakes.

Real text, the product's own loop. What scaling is for does not show in the loss of so small a batch: a gradient of the
mean over many tokens is small in proportion, so the same microbatch is looked at as a part of a large batch, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fourfold.lab import precision_mistakes as mistakes
from fourfold.lab import precision_ranks as ranks
from fourfold.lab.precision_exercise import FP16, UNSCALED, Lab
from fourfold.plan.parameters import count_parameters
from fourfold.record.finding import Finding, document, fact, not_tested, write_findings
from fourfold.record.reader import RunReader
from fourfold.verify.out import open_folder, open_room

SCHEMA = "fourfold.lab.precision/1"
LARGE = 2**18  # tokens of a step of a large run
LAST = 5  # steps whose mean loss is compared
WITHIN = 0.05  # of fp32's: a few skipped steps of 32 leave the loss behind by about as much
# Shares of a gradient's elements that are 0: at most with a scale, at least without.
VANISHED, LOST = 0.01, 0.1


class Asked(NamedTuple):
    """One way to train: its title and what it sets."""

    title: str
    sets: tuple[str, ...]


RUNS: Mapping[str, Asked] = {
    "fp32": Asked("fp32", ()),
    "bf16": Asked("bf16", ("precision.compute=bf16",)),
    "fp16": Asked("fp16, scaled", (*FP16, "precision.scale_every=8")),  # so that it climbs until it overflows
    "fp16-unscaled": Asked("fp16, not scaled", UNSCALED),
}


@dataclass(slots=True)
class Seen:
    """What came of one of them. vanished: share of a gradient's elements that are 0; gap: from fp32's, relative."""

    name: str
    lines: Sequence[Mapping[str, Any]]
    skips_told: int
    bytes: dict[str, int] = field(default_factory=dict)
    vanished: float = 0.0
    gap: float = 0.0

    @property
    def losses(self) -> list[float]:
        return [float(line["loss"]) for line in self.lines]

    @property
    def end(self) -> float:
        """Mean loss of the last steps."""
        return sum(self.losses[-LAST:]) / LAST

    @property
    def skipped(self) -> list[int]:
        return [int(line["step"]) for line in self.lines if line.get("skipped")]

    def entry(self) -> dict[str, Any]:
        """As it stands in the document."""
        return {
            "name": self.name,
            "title": RUNS[self.name].title,
            "losses": self.losses,  # by step
            "loss_at_the_end": self.end,
            "scales": [line.get("scale") for line in self.lines],
            "skipped_steps": self.skipped,
            "tokens_per_s": median(float(line["tokens_per_s"]) for line in self.lines[LAST:]),
            "bytes": self.bytes,
            "gradient_in_a_large_batch": {"tokens": LARGE, "vanished": self.vanished, "gap": self.gap},
        }


def lab_precision(
    *,
    out: Path | None = None,
    setup: str | None = None,
    device: str = "cpu",
    command: str = "fourfold lab precision",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train in each precision, look at memory and gradients, and make each classic mistake.

    out: folder for the findings (default: the next free runs/verify-lab-<n>); the runs stay in lab-precision-<n> in it.
    setup: "module:function" called in every rank first. device: "cpu" or "cuda", of what one rank shows. say: takes
    each line of the story. Returns the document fourfold.lab.precision/1: "pass" if every precision does what it is
    for, and every mistake fails and is caught.
    """
    with (
        open_folder(out, "lab") as results,
        open_room(results, "lab-precision") as folder,
        closing(Lab(folder, setup, command, device)) as lab,
    ):
        runs = {name: _seen(lab, name, say) for name in RUNS}
        _gradients(lab, runs)
        shown = []
        for exercise in mistakes.EXERCISES:
            shown.append(exercise(lab))
            say(f"mistake {len(shown)}/{len(mistakes.EXERCISES)}: {shown[-1].title}")
    findings = [*_findings(runs, command), _speed(device), *(one for each in shown for one in each.findings)]
    plan = lab.plan(1)
    facts: dict[str, Any] = {
        "steps": plan.steps,
        "parameters": count_parameters(plan.spec.model),
        "tokens_per_step": plan.tokens_per_step,
        "scale_every": lab.plan(1, *RUNS["fp16"].sets).spec.precision.scale_every,
        "runs": [seen.entry() for seen in runs.values()],
        "mistakes": [each.entry() for each in shown],
        "folder": str(lab.folder),
    }
    path = write_findings(results, "lab-precision", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, findings_file=str(path))


def _seen(lab: Lab, name: str, say: Callable[[str], None]) -> Seen:
    plan = lab.plan(1, *RUNS[name].sets)
    run = lab.run(name, plan)
    lab.in_ranks(1, ranks.course, plan, run.path, "")
    reader = RunReader(run.path)
    told = sum(event["kind"] == "skipped" for event in reader.events(0))
    seen = Seen(name, [line for line in reader.metrics() if "loss" in line], told)
    say(
        f"{RUNS[name].title}: loss {seen.losses[0]:.3f} in step 1, "
        f"{seen.end:.3f} on average in the last {LAST} of {len(seen.lines)}"
    )
    return seen


def _gradients(lab: Lab, runs: Mapping[str, Seen]) -> None:
    """Fill in bytes, and what becomes of one microbatch's gradient in a large batch, against fp32's."""
    right = None
    for name, seen in runs.items():
        held = lab.in_ranks(1, ranks.held, lab.plan(1, *RUNS[name].sets), LARGE)[0]
        gradient = held.pop("gradient")
        right = gradient if right is None else right
        seen.bytes = held
        seen.vanished = float((gradient == 0).double().mean())
        seen.gap = float((gradient - right).norm() / right.norm())


def _findings(runs: Mapping[str, Seen], command: str) -> list[Finding]:
    fp32, bf16, fp16, unscaled = runs.values()
    gaps = [abs(seen.end / fp32.end - 1) for seen in (bf16, fp16)]
    halved = [
        later["scale"] == line["scale"] / 2
        for line, later in zip(fp16.lines, fp16.lines[1:], strict=False)
        if line["skipped"]
    ]
    state = [(seen.bytes["parameters"], seen.bytes["moments"]) for seen in runs.values()]
    kept = [seen.bytes["kept"] for seen in runs.values()]
    return [
        fact(
            "bf16, and fp16 with loss scaling, train like fp32",
            f"mean loss of the last {LAST} steps within {WITHIN:.0%} of fp32's",
            f"fp32 {fp32.end:.4f}; bf16 {gaps[0]:.2%} off, fp16 {gaps[1]:.2%} off, with {len(fp16.skipped)} of "
            f"{len(fp16.lines)} updates skipped",
            max(gaps) <= WITHIN,
            command=command,
        ),
        fact(
            f"in fp16 without a scale a gradient vanishes in a batch of {LARGE:,} tokens; with it, it does not",
            f"more than {LOST:.0%} of its elements are 0 without, less than {VANISHED:.0%} with",
            f"{unscaled.vanished:.1%} without, {fp16.vanished:.1%} with; the norm of the difference from fp32's "
            f"gradient is {unscaled.gap:.2g} of that gradient's norm without, {fp16.gap:.2g} with (bf16, which needs "
            f"no scale: {bf16.gap:.2g})",
            unscaled.vanished > LOST and fp16.vanished < VANISHED,
            command=command,
        ),
        fact(
            "the loss scale grows until a gradient overflows; that step makes no update, which is recorded, and halves "
            "the scale",
            "at least one such step; as many in the metrics as in the events; each halves the scale",
            f"in the metrics: {', '.join(f'step {step}' for step in fp16.skipped) or 'none'}; in the events: "
            f"{fp16.skips_told}; {sum(halved)} of {len(halved)} halved the scale",
            bool(fp16.skipped) and fp16.skips_told == len(fp16.skipped) and all(halved),
            command=command,
        ),
        fact(
            "what AdamW updates, and its moments, are fp32 in every precision",
            "the same bytes in all, those of the moments twice those of the parameters",
            "; ".join(
                f"{one:,} bytes of parameters, {other:,} of moments" for one, other in sorted(set(state))
            ),
            len(set(state)) == 1 and state[0][1] == 2 * state[0][0],
            command=command,
        ),
        fact(
            "a forward keeps less for its backward in bf16 and fp16 than in fp32",
            f"less than fp32's {kept[0]:,} bytes a microbatch",
            f"{kept[1]:,} bytes in bf16, {kept[2]:,} in fp16",
            max(kept[1:]) < kept[0],
            command=command,
        ),
    ]


def _speed(device: str) -> Finding:
    claim = "bf16 and fp16 are faster than fp32"
    if device == "cpu":
        why = "most CPUs have no fp16 arithmetic; what is told of speed here is this machine's"
        return not_tested(claim, why, "the same precisions on a CUDA device: fourfold lab device")
    why = "so small a model waits for the host, not for the device's arithmetic"
    return not_tested(
        claim, why, "a model of a real size: fourfold train llama3-8b --set precision.compute=bf16"
    )
