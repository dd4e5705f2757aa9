from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.spec.boxes import Box, shard_range
from fourfold.verify.boxes import Part, missing, uncovered


def test_what_no_box_holds_is_counted():
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    assert missing((4, 3), halves) == 0
    assert missing((4, 3), halves[:1]) == 6
    assert missing((4, 3), [*halves, Box((4, 0), (0, 3))]) == 0, (
        "an empty box holds nothing and harms nothing"
    )
    assert missing((4, 3), [Box((0, 0), (3, 3)), Box((1, 0), (3, 2))]) == 1, "boxes may overlap"
    assert missing((), [Box((), ())]) == 0 and missing((), []) == 1
    assert missing((0, 3), []) == 0


@given(st.tuples(*[st.integers(1, 5)] * 2), st.lists(st.tuples(*[st.integers(0, 4)] * 4), max_size=5))
def test_it_counts_as_a_mask_would(shape, corners):
    boxes, held = [], np.zeros(shape, dtype=bool)
    for top, left, height, width in corners:
        offset = (min(top, shape[0]), min(left, shape[1]))
        size = (min(height, shape[0] - offset[0]), min(width, shape[1] - offset[1]))
        boxes.append(Box(offset, size))
        held[boxes[-1].slices] = True
    assert missing(shape, boxes) == int((~held).sum())


@given(st.integers(0, 9), st.integers(1, 4))
def test_every_cut_of_the_product_covers(length, parts):
    boxes = []
    for index in range(parts):
        offset, size = shard_range(length, parts, index)
        boxes.append({"a": Box((offset,), (size,))})
    assert uncovered({"a": (length,)}, boxes) == {}
    if length:
        assert uncovered({"a": (length,)}, boxes[1:]) == {"a": boxes[0]["a"].elements}


def test_a_box_is_judged_by_the_size_of_the_whole_tensor():
    whole = np.array([[1.0, 2.0], [100.0, 4.0]])
    part = Part(whole[:1] + 1e-3, Box((0, 0), (1, 2)))
    assert part.gap(whole, 100.0, 0.0) == pytest.approx(1e-5)
    assert part.gap(whole, 100.0, 1e6) == pytest.approx(1e-6), (
        "never finer than a share of the largest of its kind"
    )
    assert Part(whole[:1] * 0.5, Box((0, 0), (1, 2))).gap(whole, 100.0, 0.0, 0.5) == 0.0
    assert Part.whole(whole).gap(whole, 100.0, 0.0) == 0.0
    assert Part(whole[:1], Box((0, 0), (2, 2))).gap(whole, 100.0, 0.0) == math.inf, "not the shape of its box"
    assert Part(whole * np.nan, Box((0, 0), (2, 2))).gap(whole, 100.0, 0.0) == math.inf
    assert part.gap(whole, math.nan, 0.0) == math.inf, "a reference that is not finite agrees with nothing"
