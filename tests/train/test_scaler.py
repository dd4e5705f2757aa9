from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.spec.training import PrecisionSpec
from fourfold.train.scaler import LossScale, Scaled, ScaleState

FP16 = PrecisionSpec(compute="fp16", scale_start=8.0, scale_every=3)


def step(scale: LossScale, *gradients: float) -> list[float]:
    held = [torch.tensor([one]) for one in gradients]
    scale.unscale(held)
    scale.settle()
    return [float(one) for one in held]


def test_it_divides_by_the_scale_exactly_and_sees_what_is_not_finite():
    scale = LossScale(FP16)
    assert step(scale, 24.0, -3.0) == [3.0, -0.375]
    assert scale.last == Scaled(8.0, False)
    for bad in (math.inf, -math.inf, math.nan):
        scale = LossScale(FP16)
        step(scale, 1.0, bad)
        assert (scale.last, scale.value) == (Scaled(8.0, True), 4.0)


def test_what_comes_after_backward_is_multiplied_in_with_the_unscaling():
    scale = LossScale(FP16)
    held = [torch.tensor([24.0])]
    scale.unscale(held, 2.0)  # two replicas, of which the mean was taken
    assert held[0].item() == 6.0


def test_it_grows_after_good_steps_in_a_row_only():
    scale = LossScale(FP16)
    values = []
    for gradient in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0):
        step(scale, gradient)
        values.append(scale.value)
    assert values == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    assert scale.backed_off == 4.0


def test_finite_gradients_whose_squares_overflow_are_no_overflow():
    scale = LossScale(FP16)
    assert step(scale, 1e38) == [pytest.approx(1.25e37)]
    assert not scale.last.skipped


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp64"])
def test_nothing_else_is_scaled_and_nothing_is_looked_at(compute):
    scale = LossScale(PrecisionSpec(compute=compute))
    assert step(scale, 3.0, math.inf) == [3.0, math.inf]
    assert (scale.value, scale.last, scale.state()) == (1.0, Scaled(1.0, False), None)
    assert len(scale.trials()) == 1


def test_a_rank_without_gradients_has_found_nothing():
    scale = LossScale(FP16)
    step(scale)
    assert scale.last == Scaled(8.0, False)


def test_trials_leave_it_alone():
    scale = LossScale(FP16)
    first, second = scale.trials()
    assert first.value == 2 * second.value
    step(first, math.inf)
    assert (scale.value, scale.good, scale.last) == (8.0, 0, Scaled(8.0, False))


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 40))
def test_a_restored_scale_goes_on_as_the_same(good, cut):
    whole, first = LossScale(FP16), LossScale(FP16)
    for at, one in enumerate(good):
        if at == cut:
            saved = first.state()
            first = LossScale(FP16)
            first.restore(ScaleState.model_validate_json(saved.model_dump_json()))
        for scale in (whole, first):
            step(scale, 1.0 if one else math.inf)
        assert (whole.state(), whole.last) == (first.state(), first.last)
