"""The schedules of pipeline parallel, and which stages stand on which rank.

A stage is a run of blocks. With several stages on a rank they go round the ranks in turn, or, in a V, down and back up:
the first and the last one are then on the same rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fourfold.spec.training import LayoutSpec, PpSchedule


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule. torch_class: in torch.distributed.pipelining. source: of the idea, and of its bubble by a formula.

    stages: of a rank by default; fixed: no other number is possible. v_shaped: the stages stand in a V.
    splits: whether the gradients of weights are computed apart from those of inputs, and later.
    """

    name: PpSchedule
    torch_class: str
    source: str
    stages: int = 2
    fixed: bool = False
    v_shaped: bool = False
    splits: bool = False

    @property
    def several(self) -> bool:
        """Whether a rank has several stages."""
        return self.stages > 1


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "ScheduleGPipe", "GPipe, arXiv 1811.06965, section 2.3", 1, fixed=True),
        Schedule("1f1b", "Schedule1F1B", "PipeDream-Flush; arXiv 2104.04473, section 2.2.1", 1, fixed=True),
        Schedule("looped-bfs", "ScheduleLoopedBFS", "Breadth-first pipeline, arXiv 2211.05953"),
        Schedule("interleaved-1f1b", "ScheduleInterleaved1F1B", "arXiv 2104.04473, section 2.2.2"),
        Schedule(
            "interleaved-zero-bubble",
            "ScheduleInterleavedZeroBubble",
            "ZB-H1 of arXiv 2401.10241, section 2, with interleaved stages",
            splits=True,
        ),
        Schedule(
            "zbv",
            "ScheduleZBVZeroBubble",
            "ZB-V, arXiv 2401.10241, section 6",
            fixed=True,
            v_shaped=True,
            splits=True,
        ),
        Schedule(
            "dualpipe-v",
            "ScheduleDualPipeV",
            "DualPipeV, github.com/deepseek-ai/DualPipe; arXiv 2412.19437, table 2",
            fixed=True,
            v_shaped=True,
            splits=True,
        ),
    )
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
    back = SCHEDULES[layout.pp_schedule].v_shaped and lap % 2 == 1
    return layout.pp - 1 - place if back else place
