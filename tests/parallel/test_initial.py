"""Initial values that each rank makes for itself: those of the whole, and only its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel import initial_jobs
from tests.parallel.one_device import DECODER, MLP

LEARNED = DECODER | {"positions": "learned", "norm": "layernorm", "ffn": "gelu"}
TWO: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "sp": True},
    *({"dp_shard": 2, "zero": stage} for stage in (1, 2, 3)),
]
FOUR: list[dict[str, Any]] = [
    {"tp": 4},
    {"tp": 2, "dp_shard": 2, "zero": 3},
    {"dp_replicate": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
    {"dp_shard": 4, "zero": 1, "wrap": "model"},
]


@pytest.mark.parametrize(
    ("world", "layout"), [*((2, layout) for layout in TWO), *((4, layout) for layout in FOUR)]
)
@pytest.mark.parametrize("model", [DECODER, LEARNED, MLP | {"layers": 3}], ids=["tied", "learned", "mlp"])
def test_the_bits_of_the_whole_build(ranks, world, layout, model):
    asked = {"dp_replicate": 1} | layout
    for dtype in (torch.float64, torch.float32):
        assert not any(ranks(world).run(initial_jobs.same_bits, model, asked, dtype))


@pytest.mark.parametrize(("world", "layout"), [(2, TWO[0]), (2, TWO[4]), (4, FOUR[1])])
def test_a_rank_makes_and_holds_its_own_boxes_only(ranks, world, layout):
    large = DECODER | {"width": 64, "ffn_width": 192, "vocabulary": 256, "layers": 4}
    told = ranks(world).run(initial_jobs.allocated, large, {"dp_replicate": 1} | layout)
    for boxes, storages, whole, largest in told:
        assert storages <= 1.01 * boxes + 8 * 64 * 40  # FSDP2 pads what does not divide
        assert boxes < 1.1 * whole / world
        assert largest <= 256 * 64 // world, "a whole tensor was made on the way"


@pytest.mark.parametrize("layout", TWO)
def test_a_model_built_whole_and_then_cut_is_the_same(ranks, layout):
    assert all(ranks(2).run(initial_jobs.built_whole_and_in_boxes, DECODER, {"dp_replicate": 1} | layout))


def test_what_is_not_cut_is_filled_whole_and_ties_stay_ties():
    assert initial_jobs.plain_parameters()
