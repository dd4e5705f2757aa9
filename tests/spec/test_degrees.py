"""Divisors and the ways to write a product."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fourfold.spec.degrees import count_factorings, divisors, factorings, nearest_divisors


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@given(st.integers(1, 400), st.integers(1, 500))
def test_nearest_divisors(number: int, to: int) -> None:
    near = nearest_divisors(number, to)
    assert near
    assert all(number % divisor == 0 for divisor in near)
    if number % to == 0:
        assert near == [to]


def test_factorings_of_nothing() -> None:
    assert list(factorings(1, (), {})) == [{}]
    assert list(factorings(2, (), {})) == []
    assert list(factorings(2, (), {}, free="dp_replicate")) == [{"dp_replicate": 2}]


@given(st.integers(1, 120), st.integers(0, 3), st.integers(1, 4))
def test_factorings_are_all_products_without_what_was(product: int, count: int, was: int) -> None:
    axes = ("tp", "pp", "cp")[:count]
    found = list(factorings(product, axes, {"tp": was}))
    assert all(math.prod(degrees.values()) == product and degrees.get("tp") != was for degrees in found)
    assert len({tuple(degrees.items()) for degrees in found}) == len(found)
    with_it = list(factorings(product, axes, {}))
    assert [degrees for degrees in with_it if degrees.get("tp") != was] == found
    assert len(list(factorings(product, axes, {}, free="dp"))) == sum(
        len(list(factorings(part, axes, {}))) for part in divisors(product)
    )


@given(st.integers(1, 400), st.integers(1, 4))
def test_factorings_are_counted_without_being_made(product: int, count: int) -> None:
    axes = ("tp", "pp", "cp", "ep")[:count]
    assert count_factorings(product, count) == len(list(factorings(product, axes, {})))
