"""The sets of degrees nearest to those asked, against all there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.spec.degrees import by_nearness, divisors, nearest_divisors, nearest_products
from fourfold.spec.grid import AXES

unhurried = settings(deadline=None, max_examples=60)


def test_nearest_products_keep_what_they_can() -> None:
    asked = {"pp": 3, "dp_replicate": 1, "tp": 2}
    assert nearest_products(asked, 8) == (
        {"pp": 4, "dp_replicate": 1, "tp": 2},
        {"pp": 2, "dp_replicate": 2, "tp": 2},
        {"pp": 2, "dp_replicate": 1, "tp": 4},
    )
    assert nearest_products(asked, 6, limit=1) == (asked,)


def test_nearest_products_at_the_edges() -> None:
    assert nearest_products({"tp": 4}, 1) == ({"tp": 1},)
    assert nearest_products({}, 1) == ({},)
    assert nearest_products({}, 2) == ()
    assert nearest_products({"tp": 2}, 2, limit=0) == ()


@unhurried
@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 48))
def test_nearest_products_are_the_nearest(asked: dict[str, int], world: int) -> None:
    def distance(new: Mapping[str, int]) -> tuple[int, float]:
        changed = sum(new[axis] != asked[axis] for axis in asked)
        return changed, round(sum(abs(math.log2(new[axis] / asked[axis])) for axis in asked), 9)

    choices = itertools.product(divisors(world), repeat=len(asked))
    all_of_them = [dict(zip(asked, choice, strict=True)) for choice in choices if math.prod(choice) == world]
    found = nearest_products(asked, world, limit=5)
    assert len(found) == min(5, len(all_of_them))
    assert len({tuple(new.items()) for new in found}) == len(found)
    assert [distance(new) for new in found] == sorted(map(distance, all_of_them))[: len(found)]


@unhurried
@given(st.integers(1, 400), st.integers(1, 500))
def test_nearest_divisors(number: int, to: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    near = nearest_divisors(number, to)
    assert near
    assert all(number % divisor == 0 for divisor in near)
    if number % to == 0:
        assert near == [to]


def test_a_free_axis_takes_what_is_left() -> None:
    answers = by_nearness({"dp_replicate": 1, "tp": 3}, 8, free="dp_replicate")
    assert list(itertools.islice(answers, 2)) == [{"dp_replicate": 2, "tp": 4}, {"dp_replicate": 4, "tp": 2}]
    assert list(by_nearness({"dp_replicate": 7}, 6, free="dp_replicate")) == [{"dp_replicate": 6}]
