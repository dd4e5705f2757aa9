"""Which stages stand on which rank: as torch's own schedules have them."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from fourfold.spec.schedules import SCHEDULES, rank_of, stages_each, stages_in_all, stages_of
from fourfold.spec.training import LayoutSpec


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_stand_where_torch_puts_them(name, pp):
    layout = LayoutSpec(pp=pp, pp_schedule=name)
    stages = stages_in_all(layout)
    assert stages == pp * stages_each(layout)
    style = "v" if SCHEDULES[name].v_shaped else "loop"
    assert {stage: rank_of(layout, stage) for stage in range(stages)} == generate_stage_to_rank_mapping(
        pp, stages, style
    )
    held = [stages_of(layout, rank) for rank in range(pp)]
    assert sorted(stage for of_rank in held for stage in of_rank) == list(range(stages))
    assert all(rank_of(layout, stage) == rank for rank, of_rank in enumerate(held) for stage in of_rank)


def test_without_a_pipeline_there_is_one_stage():
    assert stages_in_all(LayoutSpec(pp_schedule="zbv")) == 1
    assert stages_of(LayoutSpec(), 0) == (0,)


def test_the_first_and_the_last_stage_of_a_v_are_on_one_rank():
    assert stages_of(LayoutSpec(pp=3, pp_schedule="zbv"), 0) == (0, 5)
    assert stages_of(LayoutSpec(pp=3, pp_schedule="interleaved-1f1b", pp_virtual=3), 2) == (2, 5, 8)
