"""The example of a user's own model goes the same way as ours: by its sharding table alone."""

from __future__ import annotations

import pytest

from tests.parallel import example_jobs


def tp(sp: bool, **more: int) -> dict[str, object]:
    return {"dp_replicate": 1, "tp": 2, "sp": sp, **more}


@pytest.mark.parametrize("sp", [False, True])
def test_it_equals_one_device(ranks, sp):
    seen = ranks(2).run(example_jobs.compare_example, tp(sp))
    assert max(one.worst for one in seen) < 1e-12
    assert {"embedding.weight", "layers.0.up.weight", "layers.1.down.weight", "head.weight"} <= seen[0].cut
    assert "join.weight" not in seen[0].cut


def test_a_plain_tensor_is_whole_on_every_rank(ranks):
    """The example multiplies its activations with masks, as a model on one device does."""
    assert ranks(2).run(example_jobs.mixed, "example", tp(False)) == ["", ""]


def test_but_not_where_heads_give_each_rank_its_own(ranks):
    assert all(
        "mixed torch.Tensor and DTensor" in said
        for said in ranks(2).run(example_jobs.mixed, "decoder", tp(False))
    )
