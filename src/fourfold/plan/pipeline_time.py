"""The time of a pipeline step, from the order of actions on each rank: who waits for whom, and for how long.

The order is given (torch's schedules make it, see `parallel.pipeline_order`); here it is only put on a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fourfold.spec.errors import CheckFailed, Problem

Kind = Literal[
    "F", "B", "I", "W"
]  # forward; the whole backward; its half for the input; its half for weights


class Action(NamedTuple):
    """What a rank does at once: one pass of one microbatch through one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


class Costs(NamedTuple):
    """Time of one stage's pass of one microbatch, in any unit; `transfer`: between two ranks."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """The time of an action of this kind."""
        return {
            "F": self.forward,
            "B": self.input_gradient + self.weight_gradient,
            "I": self.input_gradient,
            "W": self.weight_gradient,
        }[kind]


EVEN = Costs()  # the usual rule of thumb: a backward is twice a forward, half of it for the weights


class Slot(NamedTuple):
    """An action on the clock."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step: each rank's actions in their order, with their times."""

    ranks: tuple[tuple[Slot, ...], ...]

    @property
    def span(self) -> float:
        """From the first action's start to the last one's end, over all ranks."""
        return max(slots[-1].end for slots in self.ranks) - min(slots[0].start for slots in self.ranks)

    @property
    def busy(self) -> float:
        """Time in actions, all ranks together."""
        return sum(slot.end - slot.start for slots in self.ranks for slot in slots)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in a step that is idle, from 0 to 1."""
        return 1.0 - self.busy / (self.span * len(self.ranks))

    @property
    def bubble_inside(self) -> float:
        """The same between a rank's own first start and last end, of the rank that takes longest.

        The measure of Qi et al., arXiv 2401.10241, section 5: steps that follow without a common end overlap.
        """
        longest = max(self.ranks, key=lambda slots: slots[-1].end - slots[0].start)
        busy = sum(slot.end - slot.start for slot in longest)
        return 1.0 - busy / (longest[-1].end - longest[0].start)

    def most_alive(self, rank: int) -> int:
        """The most passes whose activations the rank holds at once: forward begun, backward (weights, too) not done.

        A microbatch counts once for each of the rank's stages that it is in.
        """
        alive = most = 0
        for slot in self.ranks[rank]:
            alive += slot.action.kind == "F"
            most = max(most, alive)
            alive -= slot.action.kind in "BW"
        return most


def timeline(orders: Sequence[Sequence[Action]], costs: Costs = EVEN) -> Timeline:
    """Start every action as soon as its rank is free and what it needs is there.

    A forward needs that of the stage before; a backward its own forward, and the input gradient of the stage after;
    the half for weights needs the half for the input. orders: by rank, each action once; a stage is on one rank.
    Raises CheckFailed where ranks would wait for each other for ever.
    """
    home = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    ended: dict[Action, float] = {}
    slots: list[list[Slot]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while len(slots[rank]) < len(order):
                action = order[len(slots[rank])]
                ready = _ready(action, home, ended, costs.transfer)
                if ready is None:
                    break
                start = max(ready, slots[rank][-1].end if slots[rank] else 0.0)
                ended[action] = start + costs.of(action.kind)
                slots[rank].append(Slot(action, start, ended[action]))
                moved = True
    for rank, order in enumerate(orders):
        if len(slots[rank]) < len(order):
            raise CheckFailed(_stuck(rank, order[len(slots[rank])]))
    return Timeline(tuple(tuple(own) for own in slots))


def _ready(action: Action, home: dict[int, int], ended: dict[Action, float], transfer: float) -> float | None:
    """When what it needs is there; None while that is not known."""
    latest = 0.0
    for any_of in _needs(action, max(home)):
        done = [other for other in any_of if other in ended]
        if not done:
            return None
        far = home[done[0].stage] != home[action.stage]
        latest = max(latest, ended[done[0]] + (transfer if far else 0.0))
    return latest


def _needs(action: Action, last: int) -> Iterator[tuple[Action, ...]]:
    """What must have been done before, each as the actions that would do."""
    stage, kind, microbatch = action
    if kind == "F":
        if stage > 0:
            yield (Action(stage - 1, "F", microbatch),)
    elif kind == "W":
        yield (Action(stage, "I", microbatch),)
    else:
        yield (Action(stage, "F", microbatch),)
        if stage < last:
            yield Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)


def _stuck(rank: int, action: Action) -> Problem:
    return Problem(
        asked="the time of a pipeline step, from the order of actions on each rank",
        found=f"rank {rank} waits for ever before {action}",
        why="what it needs is never done, or only after something that waits for this rank",
        instead="an order in which every action comes after what it needs",
    )
