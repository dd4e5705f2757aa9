"""A layout meets its world size: what "auto" becomes, and ways to the nearest layout that fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from math import log2, prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.spec.degrees import divisors
from fourfold.spec.errors import SpecError
from fourfold.spec.fit import SETTINGS, fill, fit, settings_of, ways
from fourfold.spec.grid import AXES, BORROWED
from fourfold.spec.training import LayoutSpec

unhurried = settings(deadline=None, max_examples=60)
PLAIN = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "pp": 1, "tp": 1, "ep": 1, "zero": 0, "sp": False}


def sensible(layout: Mapping[str, Any]) -> bool:
    """A rule or two, so that not everything is legal."""
    return (layout["zero"] > 0) == (layout["dp_shard"] > 1) and not (layout["sp"] and layout["tp"] == 1)


def test_fit_fills_auto() -> None:
    fitted = fit(LayoutSpec(pp=2, tp=2), 8)
    assert (fitted.dp_replicate, fitted.dp_shard) == (2, 1)
    assert fit(fitted, 8) == fitted
    assert fit(LayoutSpec(dp_replicate=2, dp_shard="auto", zero=3), 8).dp_shard == 4
    assert fit(LayoutSpec(), 1).dp_replicate == 1


def test_zero_takes_what_the_world_leaves_as_shards() -> None:
    fitted = fit(LayoutSpec(zero=2, tp=2), 8)
    assert (fitted.dp_replicate, fitted.dp_shard) == (1, 4)
    assert fit(fitted, 8) == fitted
    hybrid = fit(LayoutSpec(zero=2, dp_shard=2), 8)
    assert (hybrid.dp_replicate, hybrid.dp_shard) == (4, 2)


@pytest.mark.parametrize(
    ("layout", "world", "says"),
    [
        (LayoutSpec(pp=3), 8, "--set layout.pp=4  (dp_replicate becomes 2)"),
        (LayoutSpec(zero=1, tp=3), 8, "--set layout.tp=4  (dp_shard becomes 2)"),
        (LayoutSpec(zero=1, tp=3), 8, 'dp_shard = "auto" (with 1, zero 1 would shard nothing)'),
        (LayoutSpec(dp_replicate=3), 8, "a world of 3 ranks"),
        (LayoutSpec(), 0, "at least one rank"),
        (LayoutSpec(), 0, "type:  a world of 1 rank"),
        (LayoutSpec(dp_replicate=1), 2, "and 1 cell is not 2"),
        (LayoutSpec(), 10**9, "a world of 262144 ranks"),
        (LayoutSpec(dp_replicate="auto", dp_shard="auto"), 8, "--set layout.dp_shard=1"),
        (LayoutSpec(tp=2, ep=4), 4, "--set layout.ep=2"),
    ],
)
def test_fit_refuses(layout: LayoutSpec, world: int, says: str) -> None:
    with pytest.raises(SpecError, match=re.escape(says)):
        fit(layout, world)


def test_a_degree_that_is_proposed_stays_as_it_is_typed() -> None:
    with pytest.raises(SpecError) as error:
        fit(LayoutSpec(zero=1, dp_shard=2), 3)
    said = str(error.value)
    assert "(dp_shard becomes" not in said and "layout.dp_shard=1" not in said
    assert "--set layout.dp_shard=3  (dp_replicate becomes 1)" in said


def test_fit_proposes_nothing_that_is_not_legal() -> None:
    with pytest.raises(SpecError) as error:
        fit(LayoutSpec(dp_replicate=5), 8, sensible)
    assert "--set layout.dp_replicate=4 --set layout.dp_shard=2\n" not in str(error.value)
    assert "--set layout.dp_replicate=8\n" in str(error.value)
    with pytest.raises(SpecError) as error:
        fit(LayoutSpec(tp=3, sp=True), 2, sensible)
    assert "--set layout.tp=2" in str(error.value)
    assert "--set layout.tp=1  (" not in str(error.value)


@unhurried
@given(
    st.fixed_dictionaries(
        {axis: st.integers(1, 6) for axis in AXES if axis != "dp_replicate"}
        | {"dp_replicate": st.sampled_from([1, 2, 3, "auto"]), "ep": st.sampled_from([1, 2, 3])}
        | {"zero": st.sampled_from([0, 1])}
    ),
    st.integers(1, 64),
)
def test_what_fit_says_to_type_fits(asked: dict[str, Any], world: int) -> None:
    layout = LayoutSpec(**asked)
    try:
        fit(layout, world, sensible)
    except SpecError as error:
        (problem,) = error.problems
    else:
        return
    for line in problem.instead.splitlines() if problem.asked.startswith("a layout for") else ():
        typed = {axis: int(degree) for axis, degree in re.findall(r"layout\.(\w+)=(\d+)", line)}
        ranks = re.search(r"a world of (\d+) ranks?", line)
        assert ranks or typed
        if typed:
            assert sensible(settings_of(fit(layout.model_copy(update=typed), world)))


# -------------------------------------------------------------------------------------------------------- ways


def test_the_smallest_change_of_each_kind_comes_first() -> None:
    asked = {**PLAIN, "dp_shard": 2}  # of two ranks, with nothing to shard
    found = ways(asked, 2, sensible, limit=4)
    assert [way.changes for way in found] == [
        {"zero": 1},
        {"dp_replicate": 2, "dp_shard": 1},
        {"dp_shard": 1, "cp": 2},
        {"dp_shard": 1, "pp": 2},
    ]
    assert str(found[1]) == "--set layout.dp_replicate=2 --set layout.dp_shard=1"
    assert found[0].settled == {**asked, "zero": 1}


def test_a_longer_way_that_does_what_a_shorter_does_is_none() -> None:
    asked = {**PLAIN, "tp": 3, "dp_replicate": "auto"}
    assert [way.changes for way in ways(asked, 8, sensible)] == [{"tp": 4}, {"tp": 2}, {"tp": 8}]
    assert str(ways({**PLAIN, "sp": True}, 1, sensible)[0]) == "--set layout.sp=false"


def test_no_way() -> None:
    assert ways(PLAIN, 2, lambda _: False) == []
    assert ways(PLAIN, 0, sensible) == []
    assert ways({**PLAIN, "dp_shard": "auto", "dp_replicate": "auto"}, 2, sensible) == []
    assert ways(PLAIN, 2, sensible, limit=0) == []


@unhurried
@given(
    st.fixed_dictionaries(
        {axis: st.integers(1, 4) for axis in AXES}
        | {"ep": st.just(1), "zero": st.integers(0, 3), "sp": st.booleans()}
    ),
    st.integers(1, 12),
)
def test_ways_lead_to_the_nearest(asked: dict[str, Any], world: int) -> None:
    """Against trying everything: as few changes as any, and of those the smallest."""
    found = ways(asked, world, sensible)
    for way in found:
        assert fill({**asked, **way.changes}, world) == way.settled
        assert sensible(way.settled)

    def far(new: Mapping[str, Any]) -> tuple[int, float]:
        change = sum(abs(log2(new[axis] / asked[axis])) for axis in AXES)
        change += abs(new["zero"] - asked["zero"]) + abs(new["sp"] - asked["sp"])
        return sum(new[key] != asked[key] for key in SETTINGS), round(change, 9)

    meshes = [degrees for degrees in product(divisors(world), repeat=len(AXES)) if prod(degrees) == world]
    every = (
        dict(zip(AXES, degrees, strict=True)) | {"ep": 1, "zero": zero, "sp": sp}
        for degrees in meshes
        for zero in range(4)
        for sp in (False, True)
    )
    best = min(far(new) for new in every if sensible(new))
    if best[0] in (1, 2, 3, 4):
        assert far(found[0].settled) == best


def test_ep_divides_what_it_borrows() -> None:
    asked = {**PLAIN, "dp_shard": 4, "zero": 1, "ep": 3}
    assert fill(asked, 4) is None
    for way in ways(asked, 4, sensible):
        assert prod(way.settled[axis] for axis in BORROWED) % way.settled["ep"] == 0
    assert [way.changes for way in ways(asked, 4, sensible)][:2] == [{"ep": 4}, {"ep": 2}]
