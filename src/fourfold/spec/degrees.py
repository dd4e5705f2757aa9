"""Degrees whose product is a given world size, nearest first to those asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations, islice

# Of two equally near answers, the one that changes an earlier axis comes first: replicas are the cheapest to
# change, for they alter no tensor's shape.
CHEAPEST_FIRST = ("dp_replicate", "dp_shard", "cp", "pp", "tp")


def nearest_products(degrees: Mapping[str, int], world: int, limit: int = 3) -> tuple[dict[str, int], ...]:
    """Up to `limit` sets of degrees with product `world`, nearest first to those asked.

    Nearest: as many of the asked degrees kept as possible; then the smallest change, the sum over axes of
    |log2(new / asked)|; then the change of the cheaper axis (`CHEAPEST_FIRST`). If the product is `world`
    already, the first answer is what was asked. Empty where nothing has that product: no axes to change.
    """
    return tuple(islice(by_nearness(degrees, world), limit))


def by_nearness(degrees: Mapping[str, int], world: int, free: str | None = None) -> Iterator[dict[str, int]]:
    """All answers of `nearest_products`, lazily; the axis `free` ("auto") takes any degree at no cost."""
    asked = [axis for axis in degrees if axis != free]
    for changed_count in range(len(asked) + 1):
        found: list[tuple[float, list[int], dict[str, int]]] = []
        for changed in combinations(asked, changed_count):
            kept = math.prod(degrees[axis] for axis in asked if axis not in changed)
            if world % kept:
                continue
            places = sorted(_place(axis) for axis in changed)
            for new in _factorings(world // kept, changed, degrees, free):
                change = sum(abs(math.log2(new[axis] / degrees[axis])) for axis in changed)
                # Rounded, so that 4 → 2 and 4 → 8 tie whatever the last bit of a logarithm says.
                found.append((round(change, 9), places, {**degrees, **new}))
        found.sort(key=lambda answer: (answer[0], answer[1], list(answer[2].values())))
        yield from (new for _, _, new in found)


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


def _place(axis: str) -> int:
    return CHEAPEST_FIRST.index(axis) if axis in CHEAPEST_FIRST else len(CHEAPEST_FIRST)


def _factorings(
    product: int, changed: tuple[str, ...], asked: Mapping[str, int], free: str | None
) -> Iterator[dict[str, int]]:
    """Every way to write `product` with a new degree for each axis of `changed`, and any for `free`."""
    if not changed:
        if free is not None:
            yield {free: product}
        elif product == 1:
            yield {}
        return
    axis, *rest = changed
    for degree in divisors(product):
        if degree != asked[axis]:
            for others in _factorings(product // degree, tuple(rest), asked, free):
                yield {axis: degree, **others}
