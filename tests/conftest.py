"""Warm pools shared by the tests of one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from fourfold.launch.pool import RankPool

settings.register_profile("no-clock", deadline=None)  # a deadline would be an assertion about time
settings.load_profile("no-clock")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(world)` is a pool of that many gloo ranks, made once per file; a broken one is made again.

    Not once per worker: every group of every mesh keeps threads that wake up several times a second, for as long as
    its ranks live. After some thirty meshes four idle ranks had 2,400 of them, and took more than half of two cores.
    """
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools or not pools[world].alive:
            pools[world] = RankPool(world, timeout_s=60)
        return pools[world]

    yield pool
    for each in pools.values():
        each.close()
