"""Divisors, and the ways to write a world size as a product of degrees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence


def divisors(number: int) -> list[int]:
    """All divisors of `number` (at least 1), ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest_divisors(number: int, to: int) -> list[int]:
    """The divisors of `number` next below and above `to`, nearer (by ratio) first; one if `to` divides."""
    all_divisors = divisors(number)
    below = [d for d in all_divisors if d <= to][-1:]
    above = [d for d in all_divisors if d >= to][:1]
    return sorted({*below, *above}, key=lambda d: abs(math.log2(d / to)))


def count_factorings(product: int, axes: int) -> int:
    """In how many ways `factorings` writes `product` as degrees of so many axes."""
    count, prime = 1, 2
    while product > 1:
        if prime * prime > product:
            prime = product
        power = 0
        while product % prime == 0:
            product, power = product // prime, power + 1
        count *= math.comb(power + axes - 1, power)
        prime += 1
    return count


def factorings(
    product: int, axes: Sequence[str], other_than: Mapping[str, object], free: str | None = None
) -> Iterator[dict[str, int]]:
    """Every way to write `product` as degrees of `axes`, none of them as in `other_than`; `free` takes any degree."""
    if not axes:
        if free is not None:
            yield {free: product}
        elif product == 1:
            yield {}
        return
    axis, *rest = axes
    for degree in divisors(product):
        if degree != other_than.get(axis):
            for others in factorings(product // degree, rest, other_than, free):
                yield {axis: degree, **others}
