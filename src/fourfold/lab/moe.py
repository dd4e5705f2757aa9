"""The experts' exercise: the way of tokens through expert parallel on real ranks, each value beside one device's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.lab import moe_layer
from fourfold.lab import moe_ranks as ranks
from fourfold.lab.gate import said
from fourfold.lab.moe_product import SETTINGS, at_the_gate
from fourfold.lab.moe_ranks import Sizes
from fourfold.lab.moe_right import furthest, gap, labels, named
from fourfold.lab.moe_steps import EP, MISTAKES, PARTS, STEPS, TOP_K, Mistake, Part
from fourfold.launch.pool import RankPool
from fourfold.record.finding import Finding, document, fact, verdict_of, write_findings
from fourfold.spec.errors import Problem, SpecError
from fourfold.verify.measure import GRADIENT_TOLERANCE, largest, relative_gap, within, worst
from fourfold.verify.out import open_folder, open_room
from fourfold.verify.reference import one_thread

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = "fourfold.lab.moe/1"
WORLDS = (2, 4)
SHOWN = Sizes(rows=2, tokens=4, width=2, experts=4, whole=True)
LARGER = Sizes(rows=2, tokens=32, width=16, experts=8, whole=False)  # of numbers with no end
CAPACITY = 1.0
STEPS_TRAINED, JUDGED = 30, 10  # and the last of them, over which the load is judged
UNEVEN = 1.5  # of the busiest expert's share in an equal one: above without balance, below with it
_EXACT = f"a relative gap of at most {GRADIENT_TOLERANCE:g} in fp64"

Values = Mapping[str, "Tensor"]


def lab_moe(
    *,
    nproc: int = 2,
    out: Path | None = None,
    setup: str | None = None,
    command: str = "fourfold lab moe",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Send the tokens of a layer to their experts on `nproc` real ranks, and back; then with each classic mistake.

    out: folder for the findings (default: the next free runs/verify-lab-<n>). setup: "module:function" called in every
    rank first. say: takes each line of the story. Returns the document fourfold.lab.moe/1: "pass" if every value is
    that of one device, with a capacity, too, if balance evens the load and is the same on one device, if every mistake
    shows, and `verify equal` catches it in the product's own experts (on 2 ranks; its findings go to a folder
    lab-moe-<n>). Raises SpecError for other than 2 or 4 ranks.
    """
    if nproc not in WORLDS:
        raise SpecError(_not_shown(nproc))
    right = ranks.one_device(SHOWN, nproc)
    with (
        one_thread(),
        open_folder(out, "lab") as folder,
        open_room(folder, "lab-moe") as room,
        RankPool(nproc, setup=setup) as pool,
    ):
        found = pool.run(ranks.layer, SHOWN)
        parts = [_part(part, found, right) for part in PARTS]
        findings = [_of_part(part, command) for part in parts]
        say(f"a layer: {len(STEPS)} values on {nproc} ranks")
        capacity, finding = _capacity(pool, found, right, command)
        findings += [finding, *_larger(pool, command)]
        say("with a capacity, on a larger layer, and by the product's own: done")
        balance, more = _balance(pool, command)
        findings += more
        say(f"balance: {STEPS_TRAINED} steps in {len(balance)} ways")
        mistakes = []
        for mistake in MISTAKES:
            entry, finding = _mistake(
                mistake, pool.run(ranks.layer, SHOWN, None, mistake.name), right, command
            )
            told = at_the_gate(mistake.name, room / mistake.name)
            entry["fourfold"], caught = said(mistake.name, told, "moe-tiny", SETTINGS, "experts", command)
            entry["verdict"] = verdict_of([finding, caught])
            mistakes.append(entry)
            findings += [finding, caught]
            say(f"mistake {len(mistakes)}/{len(MISTAKES)}: {mistake.title}")
        facts: dict[str, Any] = {
            "ranks": nproc,
            "ep": EP,
            "sizes": SHOWN._asdict(),
            "parts": parts,
            "capacity": capacity,
            "balance": balance,
            "mistakes": mistakes,
            "folder": str(room),
        }
        path = write_findings(folder, "lab-moe", findings, SCHEMA, **facts)
    return document(SCHEMA, findings, **facts, findings_file=str(path))


def _part(part: Part, found: Sequence[Values], right: Values) -> dict[str, Any]:
    world = len(found)
    steps = [
        {
            **step._asdict(),
            "shapes": [list(have[step.name].shape) for have in found],
            "ranks": [have[step.name].tolist() for have in found],
            "labels": [labels(step, rank, world, right) for rank in range(world)],
            "one_device": right[step.of].tolist(),
            "gap": gap(step, found, right),
        }
        for step in part.steps
    ]
    return {"name": part.name, "title": part.title, "steps": steps}


def _of_part(part: Mapping[str, Any], command: str) -> Finding:
    off = worst(step["gap"] for step in part["steps"])
    return fact(
        f"{part['name']}: every value of every rank is one device's, its part of it, or its share of the sum",
        _EXACT,
        f"{len(part['steps'])} values, the worst {off:.1e} off",
        within(off, GRADIENT_TOLERANCE),
        tolerance=f"{GRADIENT_TOLERANCE:g}",
        command=command,
    )


def _capacity(
    pool: RankPool, free: Sequence[Values], right: Values, command: str
) -> tuple[dict[str, Any], Finding]:
    """With a limit to what experts take: which choices are dropped, what ranks receive, and whether values hold."""
    limited = ranks.one_device(SHOWN, pool.world, CAPACITY)
    found = pool.run(ranks.layer, SHOWN, CAPACITY)
    off = worst(gap(step, found, limited) for step in STEPS)
    per_row = [
        {"over": over, "tokens": tokens, **_dropped(right, tokens)}
        for over, tokens in (
            ("each row", SHOWN.tokens),
            ("all rows together", SHOWN.rows * SHOWN.tokens),
            ("each half of a row", SHOWN.tokens // 2),
        )
    ]
    finding = fact(
        "capacity: what is dropped is told by the row, so every value is one device's again",
        _EXACT,
        f"{len(per_row[0]['dropped'])} of {right['chosen'].numel()} choices dropped; the worst of {len(STEPS)} values "
        f"{off:.1e} off",
        within(off, GRADIENT_TOLERANCE),
        tolerance=f"{GRADIENT_TOLERANCE:g}",
        command=command,
    )
    entry = {
        "factor": CAPACITY,
        "dropped": per_row,
        "y": {"free": right["y"].tolist(), "limited": [have["y"].tolist() for have in found]},
        "load": {"free": _received(free), "limited": _received(found)},
    }
    return entry, finding


def _dropped(right: Values, tokens: int) -> dict[str, Any]:
    """The limit of an expert, and which choices are beyond it, if it were defined over so many tokens."""
    limit, kept = ranks.fits(right["chosen"].view(-1, tokens, TOP_K), SHOWN, CAPACITY)
    choices = [choice for choice, fits in enumerate(kept.flatten().tolist()) if not fits]
    return {"limit": limit, "dropped": named(choices, right)}


def _received(found: Sequence[Values]) -> list[dict[str, int]]:
    """By rank: choices that its experts compute, those of them that other ranks sent, and their bytes, one way."""
    entries = []
    for rank, have in enumerate(found):
        by_rank = have["counts that came"].sum(1).tolist()
        others = sum(by_rank) - by_rank[rank % EP]
        size = have["came"].element_size() * have["came"].shape[1]
        entries.append({"choices": len(have["came"]), "from_others": others, "bytes": others * size})
    return entries


def _larger(pool: RankPool, command: str) -> list[Finding]:
    """A larger layer of random numbers, with and without a capacity; and the product's own layer on these numbers."""
    own, theirs = [], []
    for capacity in (None, CAPACITY):
        right = ranks.one_device(LARGER, pool.world, capacity)
        found = pool.run(ranks.layer, LARGER, capacity)
        products = pool.run(moe_layer.by_product, LARGER, capacity)
        own += [gap(step, found, right) for step in STEPS]
        theirs.append(_products(products, right))
    size = f"{LARGER.rows} rows of {LARGER.tokens} tokens, width {LARGER.width}, {LARGER.experts} experts"
    return [
        fact(
            claim,
            _EXACT,
            f"{size}: {what}, with and without a capacity, the worst {off:.1e} off",
            within(off, GRADIENT_TOLERANCE),
            tolerance=f"{GRADIENT_TOLERANCE:g}",
            command=command,
        )
        for claim, what, off in (
            ("larger: so it is on a larger layer of random numbers", f"{len(STEPS)} values", worst(own)),
            (
                "product: Fourfold's own mixture under its expert parallel computes the same",
                "y, ∂x, ∂A, ∂R with that of the auxiliary loss",
                worst(theirs),
            ),
        )
    ]


def _products(found: Sequence[Values], right: Values) -> float:
    """How far the product's layer is off; its gradients have that of the auxiliary loss in them."""
    world = len(found)
    kind = largest(value.numpy() for name, value in right.items() if name.startswith("∂"))
    parts = {
        "y": right["y"].chunk(world),
        "∂x": (right["∂x"] + right["∂x of aux"]).chunk(world),
        "∂A": right["∂A"].chunk(EP) * (world // EP),
        "∂R": [right["∂R"] + right["∂R of aux"]] * world,
    }
    return worst(
        relative_gap(have[name].numpy(), parts[name][rank].numpy(), kind)
        for rank, have in enumerate(found)
        for name in parts
    )


def _balance(pool: RankPool, command: str) -> tuple[list[dict[str, Any]], list[Finding]]:
    """A router trained without balance, with the auxiliary loss, with corrections: on ranks and on one device."""
    entries: list[dict[str, Any]] = []
    gaps, same = [], True
    for name in moe_layer.BALANCES:
        alone = moe_layer.train(name, STEPS_TRAINED)
        found = pool.run(moe_layer.train, name, STEPS_TRAINED)
        size = largest([alone.router.numpy()])
        gaps += [relative_gap(one.router.numpy(), alone.router.numpy(), size) for one in found]
        same = same and all(one.loads.equal(alone.loads) for one in found)
        loads = found[0].loads
        uneven = loads.max(1).values * loads.shape[1] / loads.sum(1)
        entries.append(
            {
                "name": name,
                "loads": loads.tolist(),
                "losses": found[0].losses.tolist(),
                "uneven": uneven.tolist(),
                "at_the_end": float(uneven[-JUDGED:].mean()),
            }
        )
    told = ", ".join(f"{one['name']} {one['at_the_end']:.2f}" for one in entries)
    even = {one["name"]: one["at_the_end"] < UNEVEN for one in entries}
    off = worst(gaps)
    return entries, [
        fact(
            "training: the auxiliary loss and the corrections even out the load of experts",
            f"the busiest expert over the mean, of the last {JUDGED} steps: above {UNEVEN:g} without, below it with",
            told,
            even == {"none": False, "loss": True, "bias": True},
            command=command,
        ),
        fact(
            "training: defined by the row, it is the same on one device",
            f"the same load of every expert in every step; routers within {GRADIENT_TOLERANCE:g} at the end",
            f"{'the same loads' if same else 'other loads'}; routers {off:.1e} off",
            same and within(off, GRADIENT_TOLERANCE),
            tolerance=f"{GRADIENT_TOLERANCE:g}",
            command=command,
        ),
    ]


def _mistake(
    mistake: Mistake, found: Sequence[Values], right: Values, command: str
) -> tuple[dict[str, Any], Finding]:
    """What it spoils and what it leaves as it was; and whether the comparison with one device says so."""
    gaps = {step.name: gap(step, found, right) for step in STEPS}
    wrong = {name: off for name, off in gaps.items() if not within(off, GRADIENT_TOLERANCE)}
    step = next(step for step in STEPS if step.name == mistake.wrong)
    pair, index = furthest(step, found, right)
    told = {
        "value": mistake.wrong,
        "rank": pair.rank,
        "index": index,
        "found": float(pair.found[tuple(index)]),
        "right": float(pair.right[tuple(index)]),
    }
    finding = fact(
        f"{mistake.name}: it raises no error; the comparison with one device catches it, and names the first value",
        f"{mistake.wrong} is the first value beyond {GRADIENT_TOLERANCE:g}",
        "; ".join(f"{name} {off:.2g}" for name, off in wrong.items()) or "no value is off",
        bool(wrong) and next(iter(wrong)) == mistake.wrong,
        command=command,
    )
    entry = {
        **mistake._asdict(),
        "gaps": wrong,
        "still_right": [name for name in gaps if name not in wrong],
        "example": told,
    }
    return entry, finding


def _not_shown(nproc: int) -> Problem:
    return Problem(
        asked=f"fourfold lab moe --nproc {nproc}",
        found=f"{SHOWN.rows} rows of {SHOWN.tokens} tokens, and {EP} ranks for {SHOWN.experts} experts",
        why="each rank has a row, or half of one: every value of every rank is printed, side by side",
        instead=f"--nproc {2 if nproc < 3 else 4}",
    )
