"""The starts of a run, and by which of them each step that stands was done.

A start goes on after a checkpoint, and takes back the steps after it. In exact mode each may be on another number of
ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Start(NamedTuple):
    """began: steps done before; world: ranks."""

    began: int
    world: int


class Starts:
    """The starts of which steps stand, and the newest. Steps count from 1.

    most: ranks of the largest start, of those too of which no step stands.
    """

    def __init__(self, starts: Sequence[Start]) -> None:
        """starts: all, in order, as a rank that was in each has written them down; the first began at 0."""
        standing: list[Start] = []
        for start in starts:
            while standing and standing[-1].began >= start.began:
                standing.pop()
            standing.append(start)
        self.starts = tuple(standing)
        self.most = max(start.world for start in starts)
        self._begun = [start.began for start in standing]

    @property
    def last(self) -> Start:
        return self.starts[-1]

    @property
    def worlds(self) -> tuple[int, ...]:
        """Numbers of ranks in order, one that stays only once: (4,) or (4, 2, 8)."""
        worlds = [start.world for start in self.starts]
        return (worlds[0], *(world for before, world in pairwise(worlds) if world != before))

    def world(self, step: int) -> int:
        """How many ranks did this step."""
        return self.starts[bisect_left(self._begun, step) - 1].world

    def due(self, rank: int, stop: int) -> list[int]:
        """The steps up to `stop` in which this rank took part."""
        return [step for step in range(1, stop + 1) if rank < self.world(step)]

    def left_after(self, rank: int) -> int:
        """The last step before the newest start, of those that this rank took part in; 0 if there is none."""
        ended = pairwise(self.starts)
        return max((following.began for start, following in ended if rank < start.world), default=0)
