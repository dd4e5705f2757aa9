"""ZeRO's stages, HSDP, and replicas beside tensor parallel, against one device, in fp64, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.spec.errors import RankFailed
from tests.parallel import sharded_jobs
from tests.parallel.one_device import DECODER, MLP, compare

TOLERANCE = 1e-12


def zero(stage: int, shard: int = 2, **more: Any) -> dict[str, Any]:
    return {"dp_replicate": 1, "dp_shard": shard, "zero": stage, **more}


def equal(seen: list[Any]) -> bool:
    assert all(one.worst < TOLERANCE for one in seen), [one.gaps for one in seen]
    return True


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micros", [1, 3])
def test_the_stages(ranks, stage, micros):
    seen = ranks(2).run(compare, DECODER, zero(stage), micros)
    assert equal(seen)
    assert len(seen[0].cut) == len(seen[1].cut) > 20  # every one of them


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_perceptron_with_rows_that_do_not_divide(ranks, stage):
    """Three outputs on four ranks are 1, 1, 1 and none."""
    assert equal(ranks(4).run(compare, MLP | {"layers": 3}, zero(stage, 4)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_between_replicas(ranks, stage):
    assert equal(ranks(4).run(compare, DECODER, zero(stage, dp_replicate=2), 2))


@pytest.mark.parametrize(
    "layout",
    [zero(stage, tp=2, sp=sp) for stage in (1, 2, 3) for sp in (False, True)]
    + [{"dp_replicate": 2, "tp": 2, "sp": sp} for sp in (False, True)],
)
def test_beside_tensor_parallel(ranks, layout):
    assert equal(ranks(4).run(compare, DECODER, layout, 2))


@pytest.mark.parametrize("layout", [zero(1), zero(3), {"dp_replicate": 2}])
@pytest.mark.parametrize("meta", [False, True])
def test_frozen_parameters_have_no_gradient_and_stay(ranks, layout, meta):
    frozen = ("norm.weight", "blocks.1.ffn.up.weight")
    seen = ranks(2).run(compare, DECODER, layout, 2, 2, 7, True, meta and "zero" in layout, frozen)
    assert equal(seen)
    assert seen[0].without_gradient == tuple(sorted(frozen))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "used",
    [
        [["ab"], ["a"]],  # on one rank only
        [["b", "a"], ["a", "a"]],  # in an earlier microbatch of one rank only
        [["a"], ["a"]],  # nowhere: no gradient, not zeros
        [[""], [""]],
    ],
)
def test_layers_used_sometimes_are_right_where_the_layout_says_so(ranks, stage, used):
    for gaps in ranks(2).run(sharded_jobs.branches, used, zero(stage, unused_parameters=True, wrap="model")):
        assert all(gap is None or gap < TOLERANCE for gap in gaps.values()), gaps
        for name in ("a", "b"):
            there = any(name in names for micros in used for names in micros)
            assert (gaps[f"{name}.weight"] is not None) is there
        assert gaps["frozen.weight"] is None


@pytest.mark.parametrize("used", [[["ab"], ["a"]], [["a"], ["b"]]])
@pytest.mark.parametrize("layout", [zero(1, dp_replicate=2), zero(3, dp_replicate=2)])
def test_and_between_replicas(ranks, used, layout):
    four = [*used, ["a"], [""]]
    for gaps in ranks(4).run(
        sharded_jobs.branches, four, layout | {"unused_parameters": True, "wrap": "model"}
    ):
        assert all(gap is None or gap < TOLERANCE for gap in gaps.values()), gaps


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_that_took_no_part_is_refused_by_name_on_its_rank(ranks, stage):
    told = ranks(2).run(sharded_jobs.refusals, [["ab"], ["a"]], zero(stage, wrap="model"))
    assert told[0] == ["", ""]
    assert "part in backward: b.weight, b.bias\n" in told[1][0]
    assert "layout.unused_parameters=true" in told[1][0]
    assert told[1][1] == "", "what was unused in one step is not held against the next"


@pytest.mark.parametrize(("stage", "gathered"), [(1, 3), (2, 3), (3, 0)])
def test_what_stays_gathered_between_microbatches(ranks, stage, gathered):
    """Two blocks and the rest are three units; nothing is gathered after a step, or after an evaluation."""
    for seen in ranks(2).run(sharded_jobs.gathered, zero(stage)):
        assert seen == [0, gathered, 0, 0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_before_the_optimizer_is_built_takes_nothing_from_it(ranks, stage):
    assert all(ranks(2).run(sharded_jobs.moves_after, zero(stage)))


@pytest.mark.parametrize("names", ["b", "a"])
@pytest.mark.parametrize("evaluating", [False, True])
def test_a_block_that_one_rank_leaves_out_is_named_before_the_others_wait_for_it(ranks, names, evaluating):
    missing = "a" if names == "b" else "b"
    with pytest.raises(RankFailed, match=f'rank 1 failed: .*block "{missing}"') as failed:
        ranks(2).run(sharded_jobs.left_out, names, zero(3), evaluating)
    assert "layout.wrap=model" in str(failed.value)
