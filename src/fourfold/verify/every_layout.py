"""Many layouts of a world against one device: one reference for all of a depth, one warm pool for each mesh shape.

Which layouts: `covering.py`. The model is made small and adversarial (`oracles.py`); what was changed is said. A rank
never gets process groups of another shape: fresh ranks are forked in between.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from fourfold.spec.errors import Problem, RankFailed, SpecError
from fourfold.spec.fit import fit
from fourfold.spec.grid import Grid
from fourfold.spec.layouts import layouts
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec
from fourfold.spec.words import counted
from fourfold.verify.case import TIMEOUT_S, Ranks, search
from fourfold.verify.covering import Choice, Chosen, choose
from fourfold.verify.equal import require_steps
from fourfold.verify.judge import Judge
from fourfold.verify.layout_words import settings, words
from fourfold.verify.layouts_document import Judged, layouts_document
from fourfold.verify.measure import PARAMETER_TOLERANCE
from fourfold.verify.oracles import Oracles, reduced
from fourfold.verify.out import open_folder

Say = Callable[[str], None]


def verify_every_layout(
    spec: Spec,
    world: int,
    *,
    steps: int = 3,
    only: Sequence[LayoutSpec] | None = None,
    out: Path | None = None,
    setup: str | None = None,
    timeout_s: float = TIMEOUT_S,
    command: str = "",
    repeat: Callable[[Sequence[str]], str] = lambda _: "",
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Compare the layouts of `world` ranks that `covering.choose` names with one device over `steps` optimizer steps.

    spec: not settled; its own degrees, zero and sp are not looked at. only: legal layouts, in place of those.
    repeat: the command that judges one layout alone, from its settings. Others as in `equal.verify_equal`.
    Returns the document fourfold.verify.equal/1 with one finding and one entry for each layout.
    Raises SpecError or DataError for a request or data that cannot be trained on, in the ranks of every layout too, or
    without a legal layout.
    """
    require_steps(steps)
    fit(LayoutSpec(), world)
    small, changes = reduced(spec, world)
    chosen = choose(small, world) if only is None else None
    found = chosen.found if chosen is not None else layouts(small, world)
    asked = list(chosen.all if chosen is not None else map(Choice, only or ()))
    if not asked:
        raise SpecError([_none_legal(world), *(refused.problem for refused in found.refused)])
    shared = Judge(command, [f"the layout: {_told_of(chosen, asked, world)}", *changes])
    with (
        open_folder(out, spec.name) as folder,
        tempfile.TemporaryDirectory(prefix="fourfold-reference-") as scratch,
    ):
        oracles = Oracles(small, world, steps, Path(scratch), shared)
        case = oracles.of(LayoutSpec()).case
        rows = case.spec.batch.global_batch
        say(
            f"one device: {counted(steps, 'step')} of {rows} samples in fp64, for {counted(len(asked), 'layout')}"
        )
        run = _Run(oracles, setup, timeout_s, repeat)
        judged = list(_told(run.all(asked), len(asked), say))
        if judged[0].refused is not None and all(one.refused for one in judged):
            raise judged[0].refused
    shared.sharpness(case.spec, spec)
    told = layouts_document(folder, spec, oracles, judged, chosen, found)
    each = f"worst {told['worst_relative']:.2g}, {told['seconds_per_layout']:.1f} s each"
    say(f"{counted(told['count'], 'layout')}, {each}")
    return told


@dataclass(slots=True)
class _Run:
    """All layouts of one request."""

    oracles: Oracles
    setup: str | None
    timeout_s: float
    repeat: Callable[[Sequence[str]], str]

    def all(self, asked: Sequence[Choice]) -> Iterator[Judged]:
        """Layouts by mesh shape, each shape with ranks of its own."""
        by_shape = sorted(asked, key=lambda choice: repr(Grid.of(choice.layout)))
        for _, of_shape in groupby(by_shape, key=lambda choice: Grid.of(choice.layout)):
            since = time.perf_counter()
            device = self.oracles.small.hardware.device
            ranks = Ranks(self.oracles.world, self.setup, self.timeout_s, device)
            try:
                for choice in of_shape:
                    yield self._judged(choice, ranks, since)
                    since = time.perf_counter()
            finally:
                ranks.close()

    def _judged(self, choice: Choice, ranks: Ranks, since: float) -> Judged:
        oracle = self.oracles.of(choice.layout)
        unused = choice.layout.unused_parameters or self.oracles.adverse
        choice = replace(choice, layout=choice.layout.model_copy(update={"unused_parameters": unused}))
        case = replace(oracle.case, spec=choice.of(oracle.case.spec))
        command = self.repeat(settings(case.spec))
        judge, deviation, refused = Judge(command, []), None, None
        try:
            judge.gate(ranks.measure(case, oracle.reference), oracle.reference)
        except RankFailed as failure:
            judge.rank_failed(failure)
            refused = failure.refusal()
        if judge.failed and refused is None:
            name = words(case.spec.layout).replace(" ", "-") + f"-{choice.cut}"
            deviation = search(case, ranks, case.steps, PARAMETER_TOLERANCE, name, oracle.traced())
            judge.first_deviation(deviation)
        seconds, own = time.perf_counter() - since, not self.oracles.adverse
        return Judged(case.spec, choice.cut, judge, seconds, deviation, command, refused, own)


def _told(judged: Iterator[Judged], count: int, say: Say) -> Iterator[Judged]:
    """One line for each, as it comes."""
    for number, one in enumerate(judged, 1):
        verdict = "FAIL" if one.verdict == "fail" else one.verdict
        line = f"[{number}/{count}] {one.words}: {verdict}, {one.gap}, {one.seconds:.1f} s"
        say(line if one.deviation is None else f"{line}; {one.deviation}")
        yield one


def _told_of(chosen: Chosen | None, asked: Sequence[Choice], world: int) -> str:
    if chosen is None:
        return f"{counted(len(asked), 'layout')} of {world} ranks"
    return (
        f"every product of degrees of {counted(world, 'rank')} that is legal, with its lowest and highest zero "
        f"({len(chosen.products)}), and {len(chosen.covering)} more, so that every two settings that are legal "
        "together are judged together"
    )


def _none_legal(world: int) -> Problem:
    return Problem(
        asked=f"every legal layout of {world} ranks",
        found="none",
        why="each is refused by one of the rules below",
        instead="another --world",
    )
