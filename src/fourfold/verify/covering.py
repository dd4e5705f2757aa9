"""Which layouts of a world are judged: every product of degrees, and enough others that every two settings meet.

All legal layouts with all their options are thousands. Faults of a mix are faults of two settings that meet, nearly
always (Kuhn, Wallace and Gallo, IEEE TSE 30(6), 2004: of failures that a setting causes, 70 to 97 % need at most two);
so every pair of values that is legal in some layout is in one that is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, get_args

from fourfold.spec.grid import AXES
from fourfold.spec.layouts import Layouts, layouts
from fourfold.spec.rules import RULES
from fourfold.spec.settle import data_parallel_degree
from fourfold.spec.spec import Spec
from fourfold.spec.training import BatchSpec, CpMethod, LayoutSpec, PpSchedule

MICROBATCHES = 2  # of a step on one rank, unless the layout is chosen for another number
CUTS = (1, MICROBATCHES, 4)  # those numbers
ROWS = MICROBATCHES * 2  # of a step, for each rank: what the finest cut makes one of
_RECOMPUTE = ("none", "full", "selective")


@dataclass(frozen=True, slots=True)
class Choice:
    """One layout to be judged. cut: its microbatches in a step on one rank, × pp, so that every schedule fills."""

    layout: LayoutSpec
    cut: int = MICROBATCHES

    def of(self, spec: Spec) -> Spec:
        """`spec`, of which the global batch is settled, on this layout."""
        whole = spec.batch.global_batch
        assert whole, "the Spec is settled"
        microbatches = self.cut * self.layout.pp
        micro = whole // (microbatches * data_parallel_degree(self.layout))
        batch = BatchSpec(global_batch=whole, micro_batch=micro, accumulation=microbatches)
        return spec.model_copy(update={"layout": self.layout, "batch": batch})

    @property
    def values(self) -> tuple[tuple[str, Any], ...]:
        """What tells it from others: those settings that count in it, with their values."""
        layout = self.layout
        names = [*AXES, "ep", "recompute"]
        names += ["zero"] * (layout.dp_shard != 1 or layout.cp > 1) + ["sp"] * (layout.tp > 1)
        names += ["cp_method"] * (layout.cp > 1) + ["pp_schedule"] * (layout.pp > 1)
        return (*((name, getattr(layout, name)) for name in names), ("cut", self.cut))


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is judged of one Spec and world.

    products: every legal product of degrees and ep with its lowest and highest zero, at the Spec's own options.
    covering: with them, every two values of settings that are legal together. pairs: how many those are.
    found: the layouts that are legal at the Spec's own options, and what refuses others.
    """

    products: tuple[Choice, ...]
    covering: tuple[Choice, ...]
    pairs: int
    found: Layouts

    @property
    def all(self) -> tuple[Choice, ...]:
        return self.products + self.covering


def choose(spec: Spec, world: int) -> Chosen:
    """The layouts of `world` ranks to judge `spec` on. spec: its batch as `Choice.of` cuts it, not settled."""
    open_batch = BatchSpec(global_batch=spec.batch.global_batch, micro_batch=1)  # cut by each choice
    spec = spec.model_copy(update={"batch": open_batch})
    found = layouts(spec, world)
    products = tuple(choice for choice in map(Choice, _ends(found.legal)) if _stands(choice, spec))
    covering, pairs = _cover(products, list(_candidates(spec, world)), spec)
    return Chosen(products, covering, pairs, found)


def _ends(legal: Iterable[LayoutSpec]) -> Iterator[LayoutSpec]:
    """Of each product of degrees and ep the lowest and the highest zero; without sp where that is legal."""
    families: dict[tuple[object, ...], list[LayoutSpec]] = {}
    for layout in legal:
        key = tuple(getattr(layout, name) for name in (*AXES, "ep"))
        families.setdefault(key, []).append(layout)
    for family in families.values():
        plain = sorted((x for x in family if x.sp == min(y.sp for y in family)), key=lambda x: x.zero)
        yield from plain[:1] + plain[1:][-1:]


def _candidates(spec: Spec, world: int) -> Iterator[Choice]:
    """Every legal layout with every value of its options, each once; a schedule has its own number of stages."""
    own = spec.layout
    seen = set()
    for method, schedule, recompute in product(get_args(CpMethod), get_args(PpSchedule), _RECOMPUTE):
        options: dict[str, Any] = {"cp_method": method, "pp_schedule": schedule, "recompute": recompute}
        if schedule != own.pp_schedule:
            options |= {"pp_virtual": None, "pp_split": None}
        of_options = spec.model_copy(update={"layout": own.model_copy(update=options)})
        for layout in layouts(of_options, world).legal:
            for cut in CUTS:
                choice = Choice(layout, cut)
                if (values := choice.values) not in seen:
                    seen.add(values)
                    yield choice


def _cover(judged: Sequence[Choice], candidates: list[Choice], spec: Spec) -> tuple[tuple[Choice, ...], int]:
    """Of the candidates, always the one with the most pairs that no other has; and all pairs, those of `judged` too."""
    numbers: dict[object, int] = {}

    def pairs(choice: Choice) -> int:
        bits = (numbers.setdefault(pair, len(numbers)) for pair in combinations(choice.values, 2))
        return sum(1 << bit for bit in bits)

    covered = 0
    for choice in judged:
        covered |= pairs(choice)
    left = [(choice, pairs(choice)) for choice in candidates]
    taken = []
    while left:
        left = [(choice, bits) for choice, bits in left if bits & ~covered]
        if not left:
            break
        best = max(left, key=lambda one: (one[1] & ~covered).bit_count())
        left.remove(best)
        if _stands(best[0], spec):
            taken.append(best[0])
            covered |= best[1]
    return tuple(taken), covered.bit_count()


def _stands(choice: Choice, spec: Spec) -> bool:
    """Whether no rule refuses it with its batch; only some are about both."""
    whole = choice.of(spec)
    return not any(rule.applies(whole) for rule in RULES)
