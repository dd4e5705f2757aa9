"""The schedules of pipeline parallel, and which stages stand on which rank.

A stage is a run of blocks. With several stages on a rank they go round the ranks in turn, or, in a V, down and back up:
the first and the last one are then on the same rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.spec.training import LayoutSpec, PpSchedule


@dataclass(frozen=True, slots=True)
class Schedule:
    """stages: of a rank by default; fixed: no other number is possible. v: the stages stand in a V.

    splits: a backward runs in two halves, inputs' gradients first, parameters' later (Qi et al., arXiv 2401.10241).
    """

    stages: int
    fixed: bool
    v: bool = False
    splits: bool = False


SCHEDULES: dict[PpSchedule, Schedule] = {
    "gpipe": Schedule(1, True),  # Huang et al., arXiv 1811.06965
    "1f1b": Schedule(1, True),  # Narayanan et al., arXiv 1806.03377
    "looped-bfs": Schedule(2, False),  # Lamy-Poirier, arXiv 2211.05953
    "interleaved-1f1b": Schedule(2, False),  # Narayanan et al., arXiv 2104.04473, section 2.2
    "interleaved-zero-bubble": Schedule(2, False, splits=True),  # Qi et al., arXiv 2401.10241
    "zbv": Schedule(2, True, v=True, splits=True),  # the same, section 6
    "dualpipe-v": Schedule(
        2, True, v=True, splits=True
    ),  # after DeepSeek-V3, arXiv 2412.19437, section 3.2.1
}


def stages_each(layout: LayoutSpec) -> int:
    """How many stages a rank has."""
    return layout.pp_virtual or SCHEDULES[layout.pp_schedule].stages


def stages_in_all(layout: LayoutSpec) -> int:
    """How many there are over all ranks; 1 without a pipeline."""
    return layout.pp * stages_each(layout) if layout.pp > 1 else 1


def stages_of(layout: LayoutSpec, index: int) -> tuple[int, ...]:
    """The stages of the rank at `index` on the pp axis, ascending."""
    if layout.pp == 1:
        return (0,)
    stages = range(stages_in_all(layout))
    return tuple(stage for stage in stages if rank_of(layout, stage) == index)


def rank_of(layout: LayoutSpec, stage: int) -> int:
    """The place on the pp axis where `stage` stands."""
    lap, place = divmod(stage, layout.pp)
    back = SCHEDULES[layout.pp_schedule].v and lap % 2 == 1
    return layout.pp - 1 - place if back else place
