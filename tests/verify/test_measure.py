from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.verify.measure import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    PARAMETER_TOLERANCE,
    PARAMETER_TOLERANCE_OWN_EPS,
    SMALLEST_SHARE,
    largest,
    relative_gap,
    within,
    worst,
)

NAN, INF = math.nan, math.inf


def test_the_bounds_are_those_of_the_house():
    assert LOSS_TOLERANCE == NORM_TOLERANCE == GRADIENT_TOLERANCE == PARAMETER_TOLERANCE == 1e-12
    assert PARAMETER_TOLERANCE_OWN_EPS == 1e-10


def test_a_gap_is_relative_to_the_largest_element_of_the_reference():
    assert relative_gap([1.0, 2.5, -4.0], [1.0, 2.0, -4.0], 4.0) == 0.5 / 4.0


def test_a_small_tensor_is_judged_against_a_thousandth_of_the_largest_of_its_kind():
    assert relative_gap([1e-9], [0.0], 10.0) == pytest.approx(1e-9 / (SMALLEST_SHARE * 10.0))
    assert relative_gap([0.5], [0.25], 10.0) == 1.0


@pytest.mark.parametrize(
    ("actual", "reference", "largest_of_kind"),
    [
        ([1.0, NAN], [1.0, 2.0], 2.0),
        ([1.0, 2.0], [NAN, 2.0], 2.0),
        ([NAN], [NAN], 1.0),
        ([INF], [INF], 1.0),
        ([1.0], [INF], 1.0),
        ([1.0], [1.0], NAN),
        ([1.0], [1.0], INF),
        ([1.0, 2.0], [1.0], 2.0),  # another shape is no small difference
        ([[1.0]], [1.0], 1.0),
        ([1e-300], [0.0], 0.0),  # nothing to judge it against
    ],
)
def test_what_is_not_finite_or_not_comparable_is_infinitely_far(actual, reference, largest_of_kind):
    assert relative_gap(actual, reference, largest_of_kind) == INF


def test_boundaries():
    assert relative_gap([], [], 0.0) == 0.0
    assert relative_gap(0.0, 0.0, 0.0) == 0.0
    assert relative_gap(np.zeros(3), np.zeros(3), 0.0) == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(0, 19))
def test_one_bad_element_anywhere_makes_it_infinite(values, place):
    reference = np.array(values)
    assert relative_gap(reference, reference, largest([reference])) == 0.0
    for bad in (NAN, INF, -INF):
        actual = reference.copy()
        actual[place % len(actual)] = bad
        assert relative_gap(actual, reference, largest([reference])) == INF


def test_the_worst_gap_never_loses_a_nan():
    assert max([0.0, NAN, 1e-16]) == 1e-16, "why max() is not used"
    assert worst([0.0, NAN, 1e-16]) == INF
    assert worst([0.0, 3e-16, 1e-16]) == 3e-16
    assert worst([]) == 0.0


def test_the_largest_magnitude_leaves_out_what_is_not_finite():
    assert largest([np.array([-3.0, 2.0]), np.array([])]) == 3.0
    assert largest([np.array([1.0, float("nan")]), np.array([float("-inf"), -2.0])]) == 2.0
    assert largest([np.array([float("nan")])]) == 0.0
    assert largest([]) == 0.0


def test_only_a_finite_gap_passes():
    assert within(1e-12, 1e-12)
    assert not within(2e-12, 1e-12)
    assert not within(NAN, INF)
    assert not within(INF, INF)
