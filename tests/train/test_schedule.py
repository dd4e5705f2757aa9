from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.spec.training import OptimizerSpec
from fourfold.train.schedule import learning_rate


def rates(steps: int, **settings: object) -> list[float]:
    optimizer = OptimizerSpec(lr=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(optimizer, steps, step) for step in range(steps)]


def test_warm_up_reaches_the_rate_in_its_last_step():
    assert rates(10, warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, 1.0] + [1.0] * 6


def test_linear_and_cosine_end_at_the_final_share_in_the_last_step():
    for schedule in ("linear", "cosine"):
        series = rates(11, schedule=schedule, final_lr_share=0.2)
        assert series[0] == pytest.approx(1.0)
        assert series[-1] == pytest.approx(0.2)
        assert series[5] == pytest.approx(0.6)  # half way, for both


def test_wsd_is_stable_and_then_decays():
    series = rates(20, schedule="wsd", decay_steps=5, warmup_steps=2, final_lr_share=0.0)
    assert series[2:15] == [1.0] * 13
    assert series[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    default = rates(100, schedule="wsd")  # by default the last tenth decays
    assert default[89] == 1.0 > default[90]


def test_wsd_never_decays_inside_the_warm_up_and_always_at_the_end():
    # Of a decay longer than the rest of the run, the part after warm-up is left, from the full rate down.
    assert rates(6, schedule="wsd", decay_steps=9, warmup_steps=2, final_lr_share=0.0) == pytest.approx(
        [0.5, 1.0, 1.0, 2 / 3, 1 / 3, 0.0]
    )
    # A tenth of five steps is none: one step decays.
    assert rates(5, schedule="wsd", final_lr_share=0.5) == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.5])


def test_one_step_and_warm_up_longer_than_the_run():
    assert rates(1, schedule="cosine") == [1.0]
    assert rates(2, warmup_steps=4) == [0.25, 0.5]


@given(
    st.integers(1, 200),
    st.integers(0, 50),
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.floats(0, 1),
)
def test_every_rate_is_positive_at_most_lr_and_falls_after_warm_up(steps, warmup, schedule, final):
    series = rates(steps, warmup_steps=warmup, schedule=schedule, final_lr_share=final)
    assert all(0.0 <= rate <= 1.0 + 1e-12 for rate in series)
    after = series[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
