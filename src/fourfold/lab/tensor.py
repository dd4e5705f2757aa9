"""The tensor exercise: a layer cut by columns and by rows over real ranks, each value beside that of one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.lab import tensor_ranks as ranks
from fourfold.lab.gate import said
from fourfold.lab.tensor_product import at_the_gate, settings_of
from fourfold.lab.tensor_ranks import Sizes
from fourfold.lab.tensor_steps import MISTAKES, PARTS, Mistake, Part, Place, Step
from fourfold.launch.pool import RankPool
from fourfold.record.finding import Finding, document, fact, verdict_of, write_findings
from fourfold.spec.errors import Problem, SpecError
from fourfold.verify.measure import GRADIENT_TOLERANCE, largest, relative_gap, within, worst
from fourfold.verify.out import open_folder, open_room

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "fourfold.lab.tensor/1"
WORLDS = (2, 4)
SHOWN = Sizes(tokens=4, width=4, hidden=8, whole=True)
LARGER = Sizes(tokens=32, width=48, hidden=96, whole=False)  # of numbers with no end

Values = Mapping[str, "Tensor"]


def lab_tensor(
    *,
    nproc: int = 2,
    out: Path | None = None,
    setup: str | None = None,
    command: str = "fourfold lab tensor",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the layer on `nproc` real ranks, with and without sequence parallel, and then with each classic mistake.

    out: folder for the findings (default: the next free runs/verify-lab-<n>). setup: "module:function" called in every
    rank first. say: takes each line of the story. Returns the document fourfold.lab.tensor/1: "pass" if every value is
    that of one device, every mistake shows, and `verify equal` catches it in the product's own tensor parallel (on 2
    ranks; its findings go to a folder lab-tensor-<n>). Raises SpecError for other than 2 or 4 ranks.
    """
    if nproc not in WORLDS:
        raise SpecError(_not_shown(nproc))
    right = ranks.one_device(ranks.inputs(SHOWN))
    with (
        open_folder(out, "lab") as folder,
        open_room(folder, "lab-tensor") as room,
        RankPool(nproc, setup=setup) as pool,
    ):
        parts, findings = [], []
        for part in PARTS:
            sequence = part.name == "sequence"
            parts.append(_part(part, pool.run(ranks.layer, SHOWN, sequence), right))
            findings += _findings(part, parts[-1], command)
            findings += _larger(part, pool, command)
            say(f"{part.title}: {len(part.steps)} values on {nproc} ranks")
        mistakes = []
        for mistake in MISTAKES:
            values = pool.run(ranks.layer, SHOWN, mistake.part == "sequence", mistake.name)
            entry, finding = _mistake(mistake, values, right, command)
            entry["fourfold"], caught = _caught(mistake, room, command)
            entry["verdict"] = verdict_of([finding, caught])
            mistakes.append(entry)
            findings += [finding, caught]
            say(f"mistake {len(mistakes)}/{len(MISTAKES)}: {mistake.title}")
        facts: dict[str, Any] = {
            "ranks": nproc,
            "sizes": SHOWN._asdict(),
            "parts": parts,
            "mistakes": mistakes,
            "folder": str(room),
        }
        path = write_findings(folder, "lab-tensor", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, findings_file=str(path))


def assembled(place: Place, values: Sequence[Tensor]) -> list[Tensor]:
    """What the ranks' values make together, to be held against one device's; of a whole one each rank's by itself."""
    import torch

    if place == "whole":
        return list(values)
    if place == "partial":
        return [torch.stack(list(values)).sum(0)]
    return [torch.cat(list(values), 0 if place == "rows" else 1)]


def _gap(step: Step, found: Sequence[Values], right: Values) -> float:
    """How far the ranks' value of a step is from one device's, relative; inf where the shape is another."""
    gradient = step.of.startswith("∂")
    kind = largest(value.numpy() for name, value in right.items() if name.startswith("∂") == gradient)
    reference = right[step.of].numpy()
    together = assembled(step.place, [have[step.name] for have in found])
    return worst(relative_gap(value.numpy(), reference, kind) for value in together)


def _part(part: Part, found: Sequence[Values], right: Values) -> dict[str, Any]:
    def entry(step: Step) -> dict[str, Any]:
        return {
            **step._asdict(),
            "shape": list(found[0][step.name].shape),
            "whole_shape": list(right[step.of].shape),
            "ranks": [have[step.name].tolist() for have in found],
            "one_device": right[step.of].tolist(),
            "gap": _gap(step, found, right),
        }

    return {
        "name": part.name,
        "title": part.title,
        "forward": [entry(step) for step in part.forward],
        "backward": [entry(step) for step in part.backward],
    }


def _findings(part: Part, entry: Mapping[str, Any], command: str) -> list[Finding]:
    steps = [*entry["forward"], *entry["backward"]]
    off = worst(step["gap"] for step in steps)
    return [
        fact(
            f"{part.name}: every value of every rank is one device's, its part of it, or its share of the sum",
            f"a relative gap of at most {GRADIENT_TOLERANCE:g} in fp64",
            f"{len(steps)} values, the worst {off:.1e} off",
            within(off, GRADIENT_TOLERANCE),
            tolerance=f"{GRADIENT_TOLERANCE:g}",
            command=command,
        )
    ]


def _larger(part: Part, pool: RankPool, command: str) -> list[Finding]:
    """The same on a larger layer of random numbers, and by torch's own styles."""
    sequence = part.name == "sequence"
    right = ranks.one_device(ranks.inputs(LARGER))
    found = pool.run(ranks.layer, LARGER, sequence)
    torchs = pool.run(ranks.by_torch, LARGER, sequence)
    own = worst(_gap(step, found, right) for step in part.steps)
    gradients = largest(value.numpy() for name, value in right.items() if name.startswith("∂"))
    theirs = worst(
        relative_gap(value.numpy(), right[name].numpy(), gradients)
        for have in torchs
        for name, value in have.items()
    )
    size = f"{LARGER.tokens} tokens, width {LARGER.width}, hidden {LARGER.hidden}"
    bound = f"a relative gap of at most {GRADIENT_TOLERANCE:g} in fp64"
    return [
        fact(
            f"{part.name}: so it is on a larger layer of random numbers",
            bound,
            f"{size}: the worst of {len(part.steps)} values {own:.1e} off",
            within(own, GRADIENT_TOLERANCE),
            tolerance=f"{GRADIENT_TOLERANCE:g}",
            command=command,
        ),
        fact(
            f"{part.name}: torch's ColwiseParallel and RowwiseParallel compute the same",
            bound,
            f"{size}: y, ∂x and the gradients of weights and biases, the worst {theirs:.1e} off",
            within(theirs, GRADIENT_TOLERANCE),
            tolerance=f"{GRADIENT_TOLERANCE:g}",
            command=command,
        ),
    ]


def _mistake(
    mistake: Mistake, found: Sequence[Values], right: Values, command: str
) -> tuple[dict[str, Any], Finding]:
    """What it spoils and what it leaves as it was; and whether the comparison with one device says so."""
    part = next(part for part in PARTS if part.name == mistake.part)
    gaps = {step.name: _gap(step, found, right) for step in part.steps}
    wrong = {name: gap for name, gap in gaps.items() if not within(gap, GRADIENT_TOLERANCE)}
    step = next(step for step in part.steps if step.name == mistake.wrong)
    rank, index = _where(step, found, right)
    told = {
        "value": mistake.wrong,
        "rank": rank,
        "index": index,
        "found": _at(found[rank][step.name], index),
        "right": _at(right[step.of], index),
    }
    finding = fact(
        f"{mistake.name}: it raises no error; the comparison with one device catches it, and names the first value",
        f"{mistake.wrong} is the first value beyond {GRADIENT_TOLERANCE:g}",
        "; ".join(f"{name} {gap:.2g}" for name, gap in wrong.items()) or "no value is off",
        bool(wrong) and next(iter(wrong)) == mistake.wrong,
        command=command,
    )
    entry = {
        **mistake._asdict(),
        "gaps": wrong,
        "still_right": [name for name, gap in gaps.items() if name not in wrong],
        "example": told,
        "ranks_differ": any(not found[0][step.name].equal(have[step.name]) for have in found),
    }
    return entry, finding


def _caught(mistake: Mistake, room: Path, command: str) -> tuple[str, Finding]:
    told = at_the_gate(mistake.name, 2, room / mistake.name)
    return said(mistake.name, told, "tiny", settings_of(mistake.name, 2), "tensor parallel", command)


def _where(step: Step, found: Sequence[Values], right: Values) -> tuple[int, list[int]]:
    """The rank and the index at which a whole value is furthest from one device's."""
    reference = right[step.of]
    gaps = [(have[step.name] - reference).abs() for have in found]
    rank = max(range(len(gaps)), key=lambda at: float(gaps[at].max()))
    flat = int(gaps[rank].argmax())
    index: list[int] = []
    for size in reversed(reference.shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return rank, index


def _at(value: Tensor, index: Sequence[int]) -> float:
    return float(value[tuple(index)])


def _not_shown(nproc: int) -> Problem:
    return Problem(
        asked=f"fourfold lab tensor --nproc {nproc}",
        found=f"a layer of {SHOWN.tokens} tokens and {SHOWN.hidden} hidden features, which is cut for 2 or 4 ranks",
        why="every value of every rank is printed, side by side",
        instead=f"--nproc {2 if nproc < 3 else 4}",
    )
