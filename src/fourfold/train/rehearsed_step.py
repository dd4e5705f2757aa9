"""A step that is rehearsed, looked at: what it holds at each moment, and which collectives it asks for."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fourfold.collectives.count import Collectives, Seen
from fourfold.collectives.rehearsed import with_values
from fourfold.collectives.tree import most_held
from fourfold.data.batch import Batch
from fourfold.parallel.bytes import held
from fourfold.plan.rehearsal import Rehearsal, Traffic, sent_bytes
from fourfold.plan.state_bytes import Category, Instant
from fourfold.spec.grid import AXES, GROUPS, PRODUCTS, Grid
from fourfold.train.live import LiveBytes
from fourfold.train.setup import Training
from fourfold.train.step import accumulate, agree_totals, clip, update

_STEPS = 4  # without moments; DDP's buckets anew; find the peak; look at it
_MICROBATCHES = 3  # a step's first, one for all between, its last


@dataclass(slots=True)
class Watch:
    """Steps of `training`, which has no values, and what is seen in them while `live` and `collectives` are entered."""

    training: Training
    live: LiveBytes
    collectives: Collectives
    at: dict[Instant, Mapping[Category, int]] = field(default_factory=dict)
    _activations: int = 0
    _peak: int = 0
    _peak_phase: str = ""
    _peak_state: Mapping[Category, int] = field(default_factory=dict)
    _phase: str = ""
    _before: int = 0
    _microbatch: int = 0
    _microbatches: int = _MICROBATCHES

    def __post_init__(self) -> None:
        leaves = self.training.parallel.leaves
        if leaves is not None:  # so many that as many sums are held before the last as in a real step
            self._microbatches = max(most_held(self.training.schedule.accumulation), _MICROBATCHES)
            leaves.order = _at_last
        self.training.beat = self._beat
        self.training.between = lambda: self._see("between microbatches")

    def run(self) -> None:
        """All that is to be seen, in order. Cycles of objects are collected between steps: each is like the other."""
        self._see("after init")
        gc.disable()
        try:
            for number in range(_STEPS):
                gc.collect()
                self._begin(number)
                self._step(number)
        finally:
            gc.enable()
        self._see("after the step")

    def told(self, parameters: int) -> Rehearsal:
        """What was seen. parameters: of the whole model."""
        return Rehearsal(
            rank=0,
            parameters=parameters,
            state=self.at,
            activations_bytes=self._activations,
            peak_bytes=self._peak,
            peak_phase=self._peak_phase,
            peak_state=self._peak_state,
            peak_beside_bytes=self._peak - _memory(self._peak_state),
            traffic=traffic_of(self.collectives.found, self.training.parallel.grid),
        )

    @property
    def _staged(self) -> bool:
        """Whether the microbatches of a step are under way together: then none stands for others."""
        return self.training.parallel.pipeline is not None

    def _see(self, instant: Instant) -> None:
        self.at[instant] = self._held()

    def _begin(self, number: int) -> None:
        self.collectives.found.clear()
        self._phase, self._microbatch = "forward", 0
        if number < _STEPS - 1:
            self.live.begin()
        else:
            self._peak, peak_at = self.live.most, self.live.at
            self.live.begin(peak_at, self._look)

    def _step(self, number: int) -> None:
        """One step, of which the microbatches between the first and the last are one."""
        training = self.training
        accumulation = training.schedule.accumulation
        with with_values():
            number_of = accumulation if self._staged else min(accumulation, self._microbatches)
            batches = [training.loader.mock()] * number_of
            pending = agree_totals(training, batches, False)
        accumulate(training, [_blank(batch) for batch in batches], pending)
        clip(training)
        update(training, number)

    def _beat(self, step: int, phase: str, patient: bool = False) -> None:  # noqa: ARG002
        self._phase = phase
        left = self.training.schedule.accumulation - self._microbatches + 1
        between = 1 if self._staged else max(left, 1)
        if phase == "forward":
            self._microbatch += 1
            if self._microbatch == 1:
                self._before = self._beside()
            elif self._microbatch == 2 and self._staged:  # its backward is not yet due
                self._activations = self._beside() - self._before
        elif phase == "backward" and self._microbatch == 1 and not self._staged:
            self._activations = self._beside() - self._before
        self.collectives.each = between if self._microbatch == 2 and between > 1 and phase != "update" else 1

    def _look(self) -> None:
        self._peak_state, self._peak_phase = self._held(), self._phase
        assert self.live.now == self._peak, "a step is like the one before"

    def _held(self) -> Mapping[Category, int]:
        found = dict(held(self.training.parallel, self.training.optimizer.tensors))
        if self.training.spec.layout.offload == "disk":
            found["on disk"], found["moments"] = found["moments"], 0
        return found

    def _beside(self) -> int:
        return self.live.now - _memory(self._held())


def _at_last(microbatches: int) -> Sequence[int]:
    """All sums are formed in a step's last microbatch."""
    return [*[0] * (microbatches - 1), microbatches - 1]


def _blank(batch: Batch) -> Batch:
    """`batch` without values."""
    held = {each.name: getattr(batch, each.name) for each in fields(batch)}
    blank: Any = {name: torch.empty_like(t) for name, t in held.items() if isinstance(t, Tensor)}
    return replace(batch, **blank)


def _memory(categories: Mapping[Category, int]) -> int:
    return sum(categories.values()) - categories["on disk"]


def traffic_of(found: Mapping[Seen, int], grid: Grid, rank: int = 0) -> tuple[Traffic, ...]:
    """Collectives by kind and axis, in the order in which a step first asks for them. rank: who takes part in them."""
    sums: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(lambda: [0, 0, 0])
    for seen, count in found.items():
        if len(seen.ranks) > 1:  # with itself a rank exchanges nothing
            own = sums[seen.kind, seen.ranks]
            own[0] += count
            own[1] += count * seen.whole_bytes
            own[2] += count * sent_bytes(seen.kind, seen.whole_bytes, len(seen.ranks))
    return tuple(
        Traffic(
            kind=kind, over=_axis(ranks, grid, rank), ranks=len(ranks), count=n, bytes=whole, sent_bytes=sent
        )
        for (kind, ranks), (n, whole, sent) in sums.items()
    )


def _axis(ranks: Sequence[int], grid: Grid, rank: int) -> str:
    """The first name of the ranks that `rank` meets there; a user's model may have a group of its own."""
    met = tuple(ranks)
    names = [name for name in (*AXES, *PRODUCTS, *GROUPS) if grid.group_of(rank, name) == met]
    along_pp = grid.group_of(rank, "pp")
    places = [grid.coordinate(one) for one in ranks]
    several = [axis for axis in AXES if len({place[axis] for place in places}) > 1]
    if len(ranks) == math.prod(grid.degree(axis) for axis in several):
        names.append(" × ".join(several))
    if met == (along_pp[0], along_pp[-1]):
        names.append("both ends of pp")
    return next(iter(names), "a group of the model's own")
