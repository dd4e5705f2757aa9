"""Units of sharding of several blocks, units gathered ahead, and what must not change once the optimizer is built."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fourfold.parallel.sharded import in_units
from fourfold.spec.errors import SpecError
from fourfold.spec.training import LayoutSpec
from tests.parallel import memory_jobs, sharded_jobs

TWO: dict[str, Any] = {"dp_replicate": 1, "dp_shard": 2}
TOLERANCE = 1e-12

UNITS: list[dict[str, Any]] = [
    {"zero": 1, "wrap": 2},
    {"zero": 2, "wrap": 3},
    {"zero": 3, "wrap": 2},
    {"zero": 1, "wrap": "model"},
    {"zero": 2, "wrap": "model"},
    {"zero": 3, "wrap": "model"},
    {"zero": 3, "wrap": 5},
    {"zero": 3, "prefetch": 1},
    {"zero": 3, "prefetch": 5},
    {"zero": 3, "wrap": 2, "prefetch": 2},
]


@pytest.mark.parametrize("units", UNITS, ids=str)
def test_every_granularity_equals_one_device(ranks, units):
    assert max(ranks(2).run(memory_jobs.compared, TWO | units, 5)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("units", UNITS, ids=str)
def test_so_it_does_with_replicas_of_the_shards_and_tensor_parallel(ranks, units):
    replicas = {"dp_replicate": 2, "dp_shard": 2} | units
    assert max(ranks(4).run(memory_jobs.compared, replicas, 5)) < TOLERANCE
    cut = TWO | {"tp": 2, "sp": True} | units
    assert max(ranks(4).run(memory_jobs.compared, cut, 5)) < TOLERANCE


# used[rank][microbatch]: the blocks of three that use their second layer, too; and the order in which they run
PARTS = [
    ([["012", "012"], ["012", "012"]], "012"),
    ([["0", "2"], ["1", ""]], "012"),
    ([["", "1"], ["", "12"]], "012"),  # the first one's on no rank
    ([["", ""], ["", ""]], "012"),
    ([["02", "1"], ["2", "0"]], "01122"),  # some twice in one forward
]


@pytest.mark.parametrize(("used", "order"), PARTS, ids=str)
@pytest.mark.parametrize("units", [{"zero": z, "wrap": w} for z in (1, 2, 3) for w in (2, 3)], ids=str)
def test_units_of_which_some_parameters_take_no_part(ranks, units, used, order):
    layout = TWO | units | {"unused_parameters": True}
    for gaps in ranks(2).run(memory_jobs.gated, used, order, layout):
        assert max(gap for gap in gaps.values() if gap is not None) < TOLERANCE, gaps


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_with_one_unit_every_rank_may_run_other_blocks(ranks, zero):
    layout = TWO | {"zero": zero, "wrap": "model", "unused_parameters": True}
    for used in ([["a", "ab"], ["b", "ab"]], [["b", "b"], ["a", "a"]], [["", "a"], ["aa", ""]]):
        for gaps in ranks(2).run(sharded_jobs.branches, used, layout):
            assert max(gap for gap in gaps.values() if gap is not None) < TOLERANCE, gaps


def test_the_next_units_are_gathered_ahead_of_the_one_that_computes(ranks):
    def seen(**more: Any) -> list[tuple[int, ...]]:
        return ranks(2).run(memory_jobs.gathered_at_blocks, TWO | {"zero": 3} | more, 4)[0]

    alone = [(0,), (1,), (2,), (3,)]
    by_torch = seen()
    assert by_torch[:4] == alone
    assert by_torch[4:] == alone[::-1]  # the next one is gathered when this one begins, after this look
    two = seen(prefetch=2)
    assert two[:4] == [(0, 1, 2), (1, 2, 3), (2, 3), (3,)]
    assert two[4:] == [(2, 3), (1, 2), (0, 1), (0,)]
    pairs = seen(wrap=2, prefetch=1)
    assert pairs[:4] == [(0, 1), (0, 1), (1,), (1,)]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("wrap", [1, 2, "model"])
def test_nothing_stays_gathered_after_forwards_without_a_backward(ranks, zero, wrap):
    assert ranks(2).run(memory_jobs.held_after_looking, TWO | {"zero": zero, "wrap": wrap}) == [0, 0]


def test_blocks_by_unit():
    blocks = [nn.Linear(1, 1) for _ in range(5)]
    sizes = {wrap: [len(unit) for unit in in_units(blocks, LayoutSpec(wrap=wrap))] for wrap in (1, 2, 4, 5)}
    assert sizes == {1: [1] * 5, 2: [2, 2, 1], 4: [4, 1], 5: [5]}
    assert [block for unit in in_units(blocks, LayoutSpec(wrap=2)) for block in unit] == blocks
    assert in_units(blocks, LayoutSpec(wrap="model")) == []
    assert in_units([], LayoutSpec()) == []
    with pytest.raises(SpecError, match=r"layout\.wrap = 6 with a model of 5 blocks"):
        in_units(blocks, LayoutSpec(wrap=6))
    with pytest.raises(SpecError, match=r"layout\.wrap=model"):
        in_units([], LayoutSpec(wrap=2))


def test_more_gathered_ahead_than_there_are_units_is_refused_when_a_model_is_built(ranks):
    for told in ranks(2).run(memory_jobs.refusal, TWO | {"zero": 3, "wrap": 2, "prefetch": 9}):
        assert "layout.prefetch = 9 with layout.wrap = 2" in told and "--set layout.prefetch=3" in told


LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    *(TWO | {"zero": zero} for zero in (1, 3)),
    {"dp_replicate": 1, "tp": 2, "sp": True},
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["copy", "plain", "frozen", "thawed"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_parameter_changed_after_the_optimizer_was_built_is_refused(ranks, layout, how, when):
    for told in ranks(2).run(memory_jobs.replaced, layout, how, when):
        assert told.startswith("CheckFailed") and "blocks.1.ffn_norm.weight was replaced" in told


@pytest.mark.parametrize("how", ["copy", "frozen", "thawed"])
def test_and_on_one_device(how):
    told = memory_jobs.replaced({"dp_replicate": 1}, how, "before")
    assert told.startswith("CheckFailed") and "blocks.1.ffn_norm.weight was replaced" in told


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_after_a_forward_the_optimizer_still_gets_what_the_rank_owns(ranks, layout):
    for rest in (True, False):
        if "zero" in layout and not rest:
            continue  # see below
        for told in ranks(2).run(memory_jobs.forward_before, layout, rest):
            moved, _, whole, _ = told.split()
            assert moved == whole


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_optimizer_of_gathered_parameters_is_refused(ranks, zero):
    for told in ranks(2).run(memory_jobs.forward_before, TWO | {"zero": zero}, False):
        assert told.startswith("CheckFailed") and "nothing would train" in told
