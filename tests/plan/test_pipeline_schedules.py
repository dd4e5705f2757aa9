from __future__ import annotations

import pytest

from fourfold.plan.pipeline_schedules import bubble_by_formula, idle_by_formula, why_not
from fourfold.plan.pipeline_time import Costs
from fourfold.spec.schedules import SCHEDULES


def test_the_textbook_shares():
    assert bubble_by_formula("gpipe", 4, 8, 1) == bubble_by_formula("1f1b", 4, 8, 1) == 3 / 11
    assert bubble_by_formula("interleaved-1f1b", 4, 8, 2) == pytest.approx(3 / (2 * 8 + 3))
    assert bubble_by_formula("looped-bfs", 4, 8, 3) == pytest.approx(3 / (3 * 8 + 3))
    assert bubble_by_formula("zbv", 4, 8, 2) == pytest.approx(3 / (2 * 8 * 3 + 3))


def test_idle_time_of_the_sources():
    costs = Costs(forward=2.0, input_gradient=3.0, weight_gradient=1.0)
    assert idle_by_formula("1f1b", 4, 8, costs) == 3 * (2 + 4)
    assert idle_by_formula("interleaved-zero-bubble", 4, 8, costs) == 3 * (2 + 4 - 2)
    assert idle_by_formula("dualpipe-v", 4, 8, costs) == 3 * ((2 + 4) + 4 - 3)
    assert idle_by_formula("zbv", 4, 8, costs) is None  # its triangle fills where all three are equal
    assert bubble_by_formula("zbv", 4, 6, 2) is None  # nor with fewer than 2p - 1 microbatches
    assert idle_by_formula("gpipe", 1, 8) == 0.0
    with pytest.raises(KeyError):
        idle_by_formula("gpip", 4, 8)


def test_what_a_schedule_demands():
    assert "(4)" in why_not("1f1b", 4, 3) and not why_not("1f1b", 4, 4)
    assert "(8)" in why_not("dualpipe-v", 4, 7) and not why_not("dualpipe-v", 4, 8)
    assert why_not("interleaved-1f1b", 4, 9) == "microbatches in 2 equal rounds"
    assert not why_not("interleaved-zero-bubble", 4, 3)
    assert [name for name in SCHEDULES if not why_not(name, 4, 1)] == [
        "gpipe", "looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"
    ]  # fmt: skip
