"""The memory exercise: one model under DDP, ZeRO 1, 2 and 3 and HSDP; what each rank is predicted to hold, and holds.

The prediction is arithmetic from the Spec and the layout. What it leaves out, activations for one, is measured too, and
told with its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.lab.memory_ranks import Held, measure
from fourfold.launch.pool import RankPool
from fourfold.plan.notes import notes_on
from fourfold.plan.parameters import count_parameters
from fourfold.plan.state_bytes import (
    CATEGORIES,
    INSTANTS,
    Category,
    Instant,
    beyond_textbook,
    element_bytes,
    rank_bytes,
    textbook,
)
from fourfold.record.finding import Finding, document, fact, not_tested, write_findings
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.model import DecoderSpec
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.verify.out import open_folder

SCHEMA = "fourfold.lab.memory/1"
TOLERANCE = 0.02  # of each category at each instant
SETTINGS = (
    "model.vocabulary=257",  # does not divide: shards are padded
    "data.sequence=64",
    "data.validation_fraction=0.0",
    "batch={micro_batch=2, accumulation=3}",
    "optimizer.warmup_steps=0",
    "run.validate_every=0",
)

PEAKS: tuple[Category, ...] = ("gathered", "gradients", "buffers")  # what a rank has more of inside a step

ByInstant = Mapping[Instant, Mapping[Category, int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of spreading the model."""

    name: str
    title: str
    zero: int
    sets: tuple[str, ...]


def layouts(nproc: int) -> list[Layout]:
    """Those that `nproc` ranks can show; layouts that share a mesh stand together."""
    shown = [Layout("ddp", "DDP: all of it on every rank", 0, ())]
    shown += [
        Layout(f"zero-{zero}", f"ZeRO-{zero}: {what} sharded", zero, (f"layout.zero={zero}",))
        for zero, what in (
            (1, "moments"),
            (2, "moments and gradients"),
            (3, "moments, gradients and parameters"),
        )
    ]
    if nproc >= 4 and nproc % 2 == 0:
        sets = ("layout.zero=3", "layout.dp_replicate=2", f"layout.dp_shard={nproc // 2}")
        shown.append(Layout("hsdp", f"HSDP: 2 replicas of ZeRO-3 over {nproc // 2}", 3, sets))
    return shown


def lab_memory(
    *,
    nproc: int = 2,
    out: Path | None = None,
    setup: str | None = None,
    command: str = "fourfold lab memory",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train two steps under every layout on `nproc` real ranks, and hold what they held against the prediction.

    out: folder for the findings (default: the next free runs/verify-lab-<n>). setup: "module:function" called in every
    rank first. say: takes each line of the story. Returns the document fourfold.lab.memory/1: "pass" if every rank
    holds what was predicted within 2 %, by category and instant, and the shards are as small as they should be.
    Raises SpecError for fewer than 2 ranks, and for a number into which the model's rows cannot be cut evenly enough.
    """
    if nproc < 2:
        raise SpecError(_too_few(nproc))
    if not is_even(nproc):
        raise SpecError(_uneven(nproc))
    findings: list[Finding] = []
    entries: list[dict[str, Any]] = []
    with open_folder(out, "lab") as folder:
        for note in notes_on(_spec(nproc, ()), nproc):
            say(f"note: {note}")
        for layout, spec, held, new in _measured(nproc, setup):
            predicted = [_predicted(spec, rank) for rank in range(nproc)]
            findings.append(_as_predicted(layout, predicted, held, command))
            entries.append({**_entry(layout, spec, predicted[0], held), "new_processes": new})
            entries[-1]["verdict"] = findings[-1].verdict
            say(f"{layout.name}: {'as predicted' if findings[-1].verdict == 'pass' else 'NOT as predicted'}")
    findings += [*_shares(entries, command), _beyond(entries, findings)]
    if entries[-1]["name"] != "hsdp":
        why = f"{nproc} ranks have no two replicas of two shards"
        findings.append(not_tested("HSDP holds what is predicted", why, "fourfold lab memory --nproc 4"))
    spec = _spec(nproc, ())
    facts = {
        "world": nproc,
        "parameters": count_parameters(spec.model),
        "element_bytes": element_bytes(spec.precision),
        "tolerance": TOLERANCE,
        "layouts": entries,
    }
    path = write_findings(folder, "lab-memory", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, findings_file=str(path))


def is_even(nproc: int) -> bool:
    """Whether under every layout rank 0, whose shards are the longest, keeps 1/shards of the state, but for padding."""
    return max(over for _, over in _overheads(nproc)) <= TOLERANCE


def _overheads(nproc: int) -> Iterator[tuple[Layout, float]]:
    """By how much of 1/shards what rank 0 keeps is predicted to be more than that, under each sharded layout."""

    def kept(spec: Spec) -> int:
        end = _predicted(spec, 0)[INSTANTS[-1]]
        return end["parameters"] + end["moments"]

    whole, *sharded = layouts(nproc)
    for layout in sharded:
        spec = _spec(nproc, layout.sets)
        assert isinstance(spec.layout.dp_shard, int), "the Spec is settled"
        yield layout, kept(spec) * spec.layout.dp_shard / kept(_spec(nproc, whole.sets)) - 1


def _measured(nproc: int, setup: str | None) -> Iterator[tuple[Layout, Spec, list[Held], bool]]:
    """Every layout with its settled Spec, what each rank held, and whether its processes were new.

    There are new ones for each shape of the mesh.
    """
    pool, shape = None, None
    try:
        for layout in layouts(nproc):
            spec = _spec(nproc, layout.sets)
            degrees = (spec.layout.dp_replicate, spec.layout.dp_shard)
            new = pool is None or degrees != shape
            if pool is None or new:
                if pool is not None:
                    pool.close()
                pool, shape = RankPool(nproc, setup=setup), degrees
            yield layout, spec, pool.run(measure, spec), new
    finally:
        if pool is not None:
            pool.close()


def _spec(nproc: int, sets: Sequence[str]) -> Spec:
    return settle(load_spec("tiny", [*SETTINGS, *sets]).spec, nproc)


def _predicted(spec: Spec, rank: int) -> ByInstant:
    found = rank_bytes(spec, rank)
    assert found is not None, "shapes of a decoder are known"
    return found


def ratio(measured: int, predicted: int) -> float:
    """measured / predicted; 1 where both are 0, and inf where only something was measured."""
    if predicted:
        return measured / predicted
    return float("inf") if measured else 1.0


def _as_predicted(
    layout: Layout, predicted: Sequence[ByInstant], held: Sequence[Held], command: str
) -> Finding:
    gaps = [
        (abs(ratio(held[rank].at[instant][category], count) - 1.0), rank, instant, category)
        for rank, at in enumerate(predicted)
        for instant, counts in at.items()
        for category, count in counts.items()
    ]
    gap, rank, instant, category = max(gaps)
    worst = held[rank].at[instant][category]
    expected = predicted[rank][instant][category]
    counted = (
        f"{len(gaps)} byte counts ({len(CATEGORIES)} categories, {len(INSTANTS)} instants, {len(held)} ranks)"
    )
    return fact(
        f"{layout.name}: every rank holds what was predicted, in each category at each instant",
        f"each byte count within {TOLERANCE:.0%} of its prediction",
        f"{counted} within {gap:.2%} of their predictions; worst: {category} {instant} on rank {rank}: "
        f"{worst:,} bytes, not {expected:,}"
        if gap
        else f"{counted}, each equal to its prediction",
        gap <= TOLERANCE,
        tolerance=f"{TOLERANCE:.0%}",
        command=command,
    )


def _entry(layout: Layout, spec: Spec, predicted: ByInstant, held: Sequence[Held]) -> dict[str, Any]:
    """What rank 0 was to hold, and held; the sizes of what is in no prediction, on the rank with most of it."""
    first, shards = held[0], spec.layout.dp_shard
    assert isinstance(shards, int), "the Spec is settled"
    ranks = spec.layout.dp_replicate if layout.name == "ddp" else shards
    assert isinstance(ranks, int), "the Spec is settled"
    usual = first.at["between microbatches"]
    return {
        "name": layout.name,
        "title": layout.title,
        "settings": [*SETTINGS, *layout.sets],
        "ranks": ranks,
        "instants": [
            {
                "instant": instant,
                "predicted": dict(predicted[instant]),
                "measured": dict(first.at[instant]),
                "predicted_bytes": sum(predicted[instant].values()),
                "measured_bytes": sum(first.at[instant].values()),
                "ratio": ratio(sum(first.at[instant].values()), sum(predicted[instant].values())),
            }
            for instant in INSTANTS
        ],
        "textbook_bytes_per_parameter": textbook(layout.zero, ranks, element_bytes(spec.precision)),
        "mixed_textbook_bytes_per_parameter": textbook(layout.zero, ranks, mixed=True),
        "beyond_textbook": beyond_textbook(spec),
        "omitted": [
            {"what": what, "bytes": max(max(count, 0) for count in counts)}
            for what, counts in (
                ("activations", [one.activations for one in held]),
                *((category, [one.most[category] - usual[category] for one in held]) for category in PEAKS),
                ("process", [one.process for one in held]),
            )
        ],
    }


def _shares(entries: Sequence[Mapping[str, Any]], command: str) -> Iterator[Finding]:
    """What is sharded is smaller by the number of shards, but for padding."""

    def kept(entry: Mapping[str, Any]) -> int:
        end = entry["instants"][-1]["measured"]
        return int(end["parameters"] + end["moments"])

    whole = kept(entries[0])
    for entry in entries[1:]:
        share, shards = kept(entry) / whole, entry["ranks"]
        yield fact(
            f"{entry['name']}: after a step, parameters and moments are 1/{shards} of what DDP holds",
            f"{1 / shards:.4f} of DDP's bytes, and at most {TOLERANCE:.0%} more for padding",
            f"{share:.4f} of DDP's bytes",
            1 / shards <= share <= (1 + TOLERANCE) / shards,
            tolerance=f"{TOLERANCE:.0%}",
            command=command,
        )


def _beyond(entries: Sequence[Mapping[str, Any]], facts: Sequence[Finding]) -> Finding:
    """The textbook's figure is no bound of what a rank holds between microbatches."""
    count = count_parameters(_spec(2, ()).model)
    assert count is not None, "a decoder's are known"
    more = {
        entry["name"]: entry["instants"][1]["measured_bytes"] / count - entry["textbook_bytes_per_parameter"]
        for entry in entries
    }
    return Finding(
        claim="between microbatches rank 0 holds more than the textbook says, under every layout",
        kind="inference",
        expected="more than 0 bytes per parameter beyond the textbook",
        measured=", ".join(f"{name} {bytes_:+.2f}" for name, bytes_ in more.items()) + " bytes per parameter",
        verdict="pass" if min(more.values()) > 0 else "fail",
        basis=tuple(finding.claim for finding in facts[: len(entries)]),
    )


def _uneven(nproc: int) -> Problem:
    layout, over = max(_overheads(nproc), key=lambda pair: pair[1])
    rows = _spec(2, ()).model
    assert isinstance(rows, DecoderSpec), "tiny is one"
    even = [number for number in range(2, rows.width + 1) if is_even(number)]
    near = [
        *[number for number in even if number < nproc][-1:],
        *[number for number in even if number > nproc][:1],
    ]
    return Problem(
        asked=f"fourfold lab memory --nproc {nproc}",
        found=f"under {layout.name} rank 0 would keep {1 + over:.4g} times its share of the state",
        why=f"tensors are cut by rows, and most of this small model's have {rows.width}; the exercise shows shares "
        f"that are right within {TOLERANCE:.0%}",
        instead=" or ".join(f"--nproc {number}" for number in near),
    )


def _too_few(nproc: int) -> Problem:
    return Problem(
        asked=f"fourfold lab memory --nproc {nproc}",
        found="no two ranks between which state could be sharded",
        why="the exercise holds one rank's part under each layout against the whole",
        instead="--nproc 2, or --nproc 4 for HSDP too",
    )
