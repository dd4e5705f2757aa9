"""Every distinct layout that a Spec can be trained with on so many ranks, and what refuses the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fourfold.spec.degrees import count_factorings, divisors, factorings
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.fit import SETTINGS, ZERO_STAGES, Settings, fit
from fourfold.spec.grid import AXES, BORROWED
from fourfold.spec.legal import Judge, settings_in
from fourfold.spec.rule import Owed, Rule
from fourfold.spec.rules import RULES
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec

MOST_MESHES = 100_000  # judged in seconds
DATA_PARALLEL = "data parallel"  # the product that the batch is cut by
_OPTIONS = tuple(key for key in SETTINGS if key not in AXES)


@dataclass(frozen=True, slots=True)
class Refused:
    """A family of layouts with one reason: `count` of them, each counted under the first rule that refuses it."""

    family: str  # as "tp > 1", or the settings of another section that refuse every layout
    rule: str
    owed: Owed
    count: int
    problem: Problem  # of one of them


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of one Spec and world: those that can be trained with, and the rest by what refuses it."""

    legal: tuple[LayoutSpec, ...]
    refused: tuple[Refused, ...]


# To be set over a Spec before it is loaded for `layouts`, which reads none of them: its own could be refused as they
# stand. Shards, and zero = 3, so that a wrap, a prefetch or an offload that needs them is not refused either.
NOT_READ = (
    *("layout.pp=1", "layout.cp=1", "layout.tp=1", "layout.ep=1", "layout.sp=false"),
    *("layout.dp_replicate=1", 'layout.dp_shard="auto"', "layout.zero=3"),
)


def layouts(spec: Spec, world: int) -> Layouts:
    """Every distinct layout of `world` ranks, judged by the table of rules and by whether the batch divides.

    spec: as it was typed, not settled; of its layout all counts but the degrees, ep, zero and sp. Options of what is
    not used are left out, for they change nothing: sp with tp = 1, zero > 0 with one rank to shard over, an ep that
    does not divide. Raises SpecError for a world below 1, or one with more layouts than can be listed.
    """
    fit(LayoutSpec(), world)
    if (meshes := count_factorings(world, len(AXES))) > MOST_MESHES:
        raise SpecError(_too_many(world, meshes))
    judge = Judge(spec, RULES)
    tally = _Tally(judge, world)
    overall = [rule for rule in RULES if not settings_in(rule) and rule.applies(spec)]
    legal = []
    for degrees in _meshes(world):
        options = _options(degrees)
        first = overall[0] if overall else judge.refusing(degrees, AXES)
        if first is not None:
            tally.count(first, degrees, math.prod(map(len, options)))
            continue
        for values in product(*options):
            settings = degrees | dict(zip(_OPTIONS, values, strict=True))
            rule = judge.refusing(settings)
            if rule is not None:
                tally.count(rule, settings)
            elif judge.batch_problem(settings) is not None:
                tally.count(None, settings)
            else:
                legal.append(spec.layout.model_copy(update=settings))
    return Layouts(tuple(legal), tally.families())


def _too_many(world: int, meshes: int) -> Problem:
    return Problem(
        asked=f"every layout of {world} ranks",
        found=f"{meshes:,} products of {len(AXES)} degrees",
        why=f"each is judged by itself, and only up to {MOST_MESHES:,} are",
        instead=f"a world of {2 ** (world.bit_length() - 1)} ranks, which has fewer divisors; or one of its layouts: "
        f"fourfold layout show --world {world} --set layout.tp=2",
    )


def _meshes(world: int) -> Iterator[dict[str, Any]]:
    """Every product of degrees; what changes no tensor's shape changes fastest."""
    order = ("pp", "cp", "tp", "dp_shard", "dp_replicate")
    yield from (dict(degrees) for degrees in factorings(world, order, {}))


def _options(degrees: Settings) -> tuple[Sequence[Any], ...]:
    """Values of `_OPTIONS` that tell layouts of these degrees apart."""
    shards = degrees["dp_shard"] * degrees["cp"] > 1
    values: dict[str, Sequence[Any]] = {
        "ep": divisors(math.prod(degrees[axis] for axis in BORROWED)),
        "zero": ZERO_STAGES if shards else (0,),
        "sp": (False, True) if degrees["tp"] > 1 else (False,),
    }
    return tuple(values[key] for key in _OPTIONS)


class _Tally:
    """How many layouts each rule refuses, and by which values of the settings that it names."""

    def __init__(self, judge: Judge, world: int) -> None:
        self._judge = judge
        self._world = world
        self._counts: dict[str, int] = {}
        self._rules: dict[str, Rule | None] = {}
        self._values: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}

    def count(self, rule: Rule | None, settings: dict[str, Any], number: int = 1) -> None:
        """`number` layouts are refused by `rule`; None is the batch."""
        name = rule.name if rule else "batch divides"
        self._rules[name] = rule
        self._counts[name] = self._counts.get(name, 0) + number
        if rule is None:
            values: tuple[Any, ...] = (settings["dp_replicate"] * settings["dp_shard"],)
        else:
            values = tuple(settings[key] for key in settings_in(rule))
        self._values.setdefault(name, {}).setdefault(values, settings)

    def families(self) -> tuple[Refused, ...]:
        """In the order of the table, the batch last."""
        order = {rule.name: number for number, rule in enumerate(RULES)}
        names = sorted(self._counts, key=lambda name: order.get(name, len(order)))
        return tuple(self._family(name) for name in names)

    def _family(self, name: str) -> Refused:
        rule, seen = self._rules[name], self._values[name]
        example = seen[min(seen)]
        if rule is None:
            problem = self._judge.batch_problem(example)
            assert problem is not None, "it was counted for it"
            label = _one(DATA_PARALLEL, {values[0] for values in seen}, divisors(self._world))
            return Refused(label, name, "mathematics", self._counts[name], problem)
        problem = rule.problem(self._judge.spec_with(self._base | example))
        return Refused(self._label(rule, set(seen)), name, rule.owed, self._counts[name], problem)

    @property
    def _base(self) -> dict[str, Any]:
        return dict.fromkeys(AXES, 1) | {"ep": 1, "zero": 0, "sp": False}

    def _label(self, rule: Rule, seen: set[tuple[Any, ...]]) -> str:
        """The refused values in few words: for each setting that matters "> 1", a value, or the values."""
        names = settings_in(rule)
        if not names:
            return ", ".join(rule.keys)
        columns = [sorted({values[place] for values in seen}) for place in range(len(names))]
        every: dict[str, Sequence[Any]] = {"zero": ZERO_STAGES, "sp": (False, True)}
        texts = [
            _one(name, set(column), every.get(name, divisors(self._world)))
            for name, column in zip(names, columns, strict=True)
        ]
        whole = all(
            rule.applies(self._judge.spec_with(self._base | dict(zip(names, values, strict=True))))
            for values in product(*columns)
        )
        return ", ".join(filter(None, texts)) + ("" if whole else " (some)")


def _one(name: str, refused: set[Any], every: Sequence[Any]) -> str:
    """The refused values of one setting; "" where it is all there are."""
    if name == "sp" and len(refused) == 1:
        return "sp" if True in refused else "no sp"
    if refused == set(every):
        return ""
    others = [value for value in every if value not in refused]
    least = min(refused)
    if len(refused) > 1 and all(value < least for value in others):
        return f"{name} > {others[-1]}"
    if len(others) < len(refused):
        return f"{name} not {', '.join(map(str, others))}"
    return f"{name} {', '.join(map(str, sorted(refused)))}"
