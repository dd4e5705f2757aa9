"""A layout meets its world size; and where it cannot be, what to type for the nearest that can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice, product, zip_longest
from typing import Any, NamedTuple

from fourfold.spec.degrees import divisors, factorings
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.grid import AXES, BORROWED, Grid
from fourfold.spec.training import LayoutSpec
from fourfold.spec.words import counted

# What tells one layout from another. Of two equally near answers, the one that changes an earlier setting comes
# first: replicas are the cheapest to change, for they alter no tensor's shape.
SETTINGS = ("dp_replicate", "dp_shard", "cp", "pp", "tp", "ep", "zero", "sp")
ZERO_STAGES = (0, 1, 2, 3)
LARGEST_WORLD = 2**18  # of a layout: more ranks than any machine has, and the most that are told one by one
MOST_CHANGES = 4  # of `ways`: further away nobody would recognise what was asked
MOST_TRIED = 20_000  # of `ways`: worlds of a hundred divisors have millions

Settings = Mapping[str, Any]  # of SETTINGS; degrees may be "auto" where said
Legal = Callable[[Settings], bool]  # asked about settings without "auto"


class Way(NamedTuple):
    """One way to a legal layout: what to change, what comes of it, and how far that is from what was asked."""

    changes: dict[str, Any]
    settled: dict[str, Any]
    distance: tuple[float, list[int], list[Any]]

    def __str__(self) -> str:
        return " ".join(f"--set layout.{key}={_word(value)}" for key, value in self.changes.items())


def settings_of(layout: LayoutSpec) -> dict[str, Any]:
    """What tells `layout` from others."""
    return {key: getattr(layout, key) for key in SETTINGS}


def fill(asked: Settings, world: int) -> dict[str, Any] | None:
    """`asked` for `world` ranks: the "auto" degree becomes what the others leave over; None where nothing fits.

    With zero > 0 and dp_shard left at 1 that is dp_shard, else there would be nothing to shard over.
    """
    settled, free = _free(asked)
    fixed = _product(settled, free)
    if len(free) > 1 or world < 1 or world % fixed or (not free and world != fixed):
        return None
    settled.update(dict.fromkeys(free, world // fixed))
    return None if math.prod(settled[axis] for axis in BORROWED) % settled["ep"] else settled


def fit(layout: LayoutSpec, world: int, legal: Legal = lambda _: True) -> LayoutSpec:
    """`layout` for `world` ranks, as `fill`; idempotent. `legal`: what else a layout that is proposed must be.

    Raises SpecError where two degrees are "auto", where the product of degrees cannot be `world` (naming the
    nearest that can, and are legal), where `ep` does not divide, or for more ranks than `LARGEST_WORLD`.
    """
    if world > LARGEST_WORLD:
        raise SpecError(_too_many(world))
    asked = settings_of(layout)
    settled, free = _free(asked)
    if len(free) > 1:
        raise SpecError(
            Problem(
                asked=" and ".join(f'layout.{axis} = "auto"' for axis in free),
                found="two degrees to be found from one world size",
                why='"auto" is what the other degrees leave over, so only one can be it',
                instead=" or ".join(f"--set layout.{axis}=1" for axis in free),
            )
        )
    filled = fill(asked, world)
    if filled is None:
        fixed = _product(settled, free)
        if world < 1 or world % fixed or (not free and world != fixed):
            raise SpecError(_product_is_not_world(asked, world, legal))
        filled = settled | dict.fromkeys(free, world // fixed)
    fitted = layout.model_copy(update=filled)
    try:
        Grid.of(fitted)
    except SpecError as error:  # ep does not divide
        found = ways(asked, world, legal, limit=12)
        found.sort(key=lambda way: "ep" not in way.changes)
        nearest = "\n     or  ".join(str(way) for way in found[:3])
        raise SpecError([replace(p, instead=nearest or p.instead) for p in error.problems]) from error
    return fitted


def ways(asked: Settings, world: int, legal: Legal, limit: int = 3) -> list[Way]:
    """Up to `limit` ways from `asked` to a layout that fills `world` and is `legal`, nearest first.

    Nearest: as few settings changed as possible; then the smallest change, the sum over degrees of
    |log2(new / asked)| and over stages of zero of |new - asked|; then the change of the cheaper setting. A way that
    changes more than another does, and what that one changes too, is left out unless there are too few others.
    In a world of very many divisors those of several changes are not all tried: then none is told of them.
    """
    if world < 1 or len(_free(asked)[1]) > 1:
        return []
    kinds: list[list[Way]] = []  # by the settings that they change
    left = MOST_TRIED
    for size in range(1, MOST_CHANGES + 1):
        here = []
        for keys in combinations(SETTINGS, size):
            if any(set(kind[0].changes) <= set(keys) for kind in kinds):
                continue
            tried = list(islice(_ways_by(keys, asked, world), left))
            left -= len(tried)
            found = [way for way in tried if legal(way.settled)] if left else []
            if found:
                here.append(sorted(found, key=lambda way: way.distance))
        kinds += sorted(here, key=lambda kind: kind[0].distance)
        if len(kinds) >= limit or (kinds and size > 1):
            break
    rounds = chain.from_iterable(zip_longest(*kinds))
    return [way for way in rounds if way is not None][:limit]


def _ways_by(keys: tuple[str, ...], asked: Settings, world: int) -> Iterator[Way]:
    """Every way to fill `world` by giving each of `keys` another value."""
    axes = tuple(key for key in keys if key in AXES)
    others = [key for key in keys if key not in AXES]
    for values in product(*(_other_values(key, asked[key], world) for key in others)):
        changes = dict(zip(others, values, strict=True))
        base, free = _free({**asked, **changes})
        if any(base[axis] == "auto" for axis in axes):
            continue
        kept = math.prod(base[axis] for axis in AXES if axis not in axes and axis not in free)
        if world % kept:
            continue
        for degrees in factorings(world // kept, axes, base, free[0] if free else None):
            new = {axis: degrees[axis] for axis in axes} | changes
            settled = fill({**asked, **new}, world)
            # A degree that would not stay as it is typed (dp_shard 1 under zero) is found by the degree it becomes.
            if settled is not None and settled.items() >= new.items():
                yield Way(new, settled, _distance(asked, new))


def _other_values(key: str, asked: Any, world: int) -> list[Any]:
    every: dict[str, Sequence[Any]] = {"zero": ZERO_STAGES, "sp": (False, True)}
    return [value for value in every.get(key, divisors(world)) if value != asked]


def _distance(asked: Settings, new: Settings) -> tuple[float, list[int], list[Any]]:
    change = 0.0
    for key, value in new.items():
        by_count = key in ("zero", "sp") or asked[key] == "auto"
        change += abs(value - asked[key]) if key in ("zero", "sp") else 0.0
        change += 0.0 if by_count else abs(math.log2(value / asked[key]))
    # Rounded, so that 4 → 2 and 4 → 8 tie whatever the last bit of a logarithm says.
    return round(change, 9), sorted(SETTINGS.index(key) for key in new), list(new.values())


def _free(asked: Settings) -> tuple[dict[str, Any], list[str]]:
    """The settings with "auto" where it belongs, and the axes that are."""
    settled = dict(asked)
    if settled["zero"] and settled["dp_replicate"] == "auto" and settled["dp_shard"] == 1:
        settled |= {"dp_replicate": 1, "dp_shard": "auto"}
    return settled, [axis for axis in AXES if settled[axis] == "auto"]


def _product(settled: Settings, free: list[str]) -> int:
    return math.prod(settled[axis] for axis in AXES if axis not in free)


def _too_many(world: int) -> Problem:
    return Problem(
        asked=f"a layout for {world} ranks",
        found=f"more than {LARGEST_WORLD} ranks",
        why="no machine has so many, and each one is placed and told by itself",
        instead=f"a world of {LARGEST_WORLD} ranks",
    )


def _product_is_not_world(asked: Settings, world: int, legal: Legal) -> Problem:
    settled, free = _free(asked)
    total = _product(settled, free)
    arithmetic = " × ".join(f"{axis} {settled[axis]}" for axis in AXES if axis not in free) + f" = {total}"
    if free:
        why = f"{world} is no multiple of {total}, so no degree of {free[0]} fills the mesh"
    else:
        cells = f"{counted(total, 'cell')} {'is' if total == 1 else 'are'} not {world}"
        why = f"every rank is one cell of the mesh, and {cells}"
    nearest = []
    for way in ways(asked, world, legal):
        now = _free({**asked, **way.changes})[1]
        nearest.append(f"{way}" + "".join(f"  ({axis} becomes {way.settled[axis]})" for axis in now))
    alone = fill(asked, total)
    if not nearest or (alone is not None and legal(alone)):
        nearest.append(f"a world of {counted(total, 'rank')}")
    return Problem(
        asked=f"a layout for {counted(world, 'rank')}",
        found=arithmetic + "".join(f', {axis} = "auto"{_why_free(asked, axis)}' for axis in free),
        why=why if world > 0 else "there must be at least one rank",
        instead="\n     or  ".join(nearest),
    )


def _why_free(asked: Settings, axis: str) -> str:
    """Why an axis is free that was not asked to be (see `_free`)."""
    return "" if asked[axis] == "auto" else f" (with {asked[axis]}, zero {asked['zero']} would shard nothing)"


def _word(value: Any) -> str:
    return str(value).lower()
