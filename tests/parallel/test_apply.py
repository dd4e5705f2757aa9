"""Which machinery a layout takes, which ranks speak for their samples, and that what is left out is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fourfold.models.mlp import MlpKit
from fourfold.models.protocol import LossModule
from fourfold.parallel.apply import is_cut, parallelize
from fourfold.spec.model import MlpSpec
from fourfold.spec.training import LayoutSpec
from tests.parallel import rank_jobs


@pytest.mark.parametrize(
    ("world", "layout", "machinery", "factor", "degree"),
    [
        (2, {"dp_replicate": 2}, "Replicas", 2, 2),
        (2, {"dp_replicate": 1, "dp_shard": 2, "zero": 1}, "Sharded", 1, 2),
        (2, {"dp_replicate": 1, "tp": 2}, "Alone", 1, 1),
        (4, {"dp_replicate": 2, "tp": 2}, "Sharded", 1, 2),
        (4, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, "Sharded", 1, 4),
    ],
)
def test_what_a_layout_becomes(ranks, world, layout, machinery, factor, degree):
    told = ranks(world).run(rank_jobs.becomes, layout)
    assert {(one["machinery"], one["factor"], one["degree"]) for one in told} == {(machinery, factor, degree)}
    tp = layout.get("tp", 1)
    assert [one["dp_rank"] for one in told] == [rank // tp for rank in range(world)]
    assert [one["counts"] for one in told] == [rank % tp == 0 for rank in range(world)]


def test_a_world_of_one_is_left_as_it_is():
    kit = MlpKit(MlpSpec(kind="mlp"))
    module = LossModule(kit, kit.build(0, torch.float64))
    parallel = parallelize(module, LayoutSpec(dp_replicate=1), torch.device("cpu"))
    assert parallel.module is module
    assert (parallel.degree, parallel.dp_rank, parallel.counts, parallel.loss_factor) == (1, 0, True, 1)
    assert not parallel.joined


@pytest.mark.parametrize(
    ("layout", "cut"),
    [
        ({"dp_replicate": 2}, False),
        ({"dp_replicate": 1, "tp": 2}, True),
        ({"dp_replicate": 1, "dp_shard": 2, "zero": 1}, True),
        ({"dp_replicate": 1, "dp_shard": 1, "zero": 3}, False),
    ],
)
def test_what_can_be_built_without_values(layout: dict[str, Any], cut: bool):
    assert is_cut(LayoutSpec(**layout)) is cut


def test_tied_parameters_stay_one_in_every_layout(ranks):
    for world, layout in (
        (2, {"tp": 2}),
        (2, {"dp_shard": 2, "zero": 3}),
        (4, {"tp": 2, "dp_shard": 2, "zero": 1}),
    ):
        assert all(ranks(world).run(rank_jobs.still_tied, {"dp_replicate": 1} | layout))
