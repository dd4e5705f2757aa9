"""Warm pools shared by the tests of one worker, and small Specs to run in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from fourfold.launch.pool import RankPool

settings.register_profile("no-clock", deadline=None)  # a deadline would be an assertion about time
settings.load_profile("no-clock")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(world)` is a pool of that many gloo ranks, made once per worker; a broken one is made again."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools or not pools[world].alive:
            pools[world] = RankPool(world, timeout_s=60)
        return pools[world]

    yield pool
    for each in pools.values():
        each.close()
