"""Experts in stages: every schedule, beside every other axis, against one device in fp64 with the adversarial model."""

from __future__ import annotations

import pytest
import torch

from fourfold.models.decoder import DecoderKit
from fourfold.parallel.stages import cut_of
from fourfold.plan.shapes import parameter_shapes
from fourfold.plan.stages import held_by
from fourfold.spec.load import load_spec
from fourfold.spec.model import DecoderSpec
from fourfold.spec.schedules import SCHEDULES
from fourfold.spec.training import LayoutSpec
from fourfold.verify.every_layout import verify_every_layout
from fourfold.verify.measure import GRADIENT_TOLERANCE
from tests.parallel.one_device import DECODER, make_kit

LOSS = ("model.moe.balance_weight=0.3", "model.moe.capacity_factor=0.8", "data.sequence=32")
BIAS = ("model.moe.balance=bias", "model.moe.balance_speed=0.05", "data.sequence=32")
SPLIT = [name for name, schedule in SCHEDULES.items() if schedule.splits]


def check(tmp_path, world, layouts, sets):
    """Holds these layouts of `moe-tiny` against one device."""
    asked = [LayoutSpec.model_validate({"dp_replicate": 1} | layout) for layout in layouts]
    spec = load_spec("moe-tiny", sets).spec
    document = verify_every_layout(spec, world, steps=2, only=asked, out=tmp_path)
    assert not {one["words"]: one["failed"] for one in document["layouts"] if one["failed"]}
    assert document["count"] == len(layouts) and document["worst_relative"] <= GRADIENT_TOLERANCE


def test_balance_by_loss_under_whole_backwards_and_split_ones(tmp_path):
    check(tmp_path, 2, [{"pp": 2}, {"pp": 2, "pp_schedule": "zbv", "recompute": "full"}], LOSS)


def test_balance_by_bias_under_whole_backwards_and_split_ones(tmp_path):
    check(tmp_path, 2, [{"pp": 2, "recompute": "full"}, {"pp": 2, "pp_schedule": "dualpipe-v"}], BIAS)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sets", [LOSS, BIAS], ids=["loss", "bias"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_schedule(tmp_path, sets, recompute):
    check(tmp_path, 2, [{"pp": 2, "pp_schedule": name, "recompute": recompute} for name in SCHEDULES], sets)


BESIDE = [
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero": 1},
    {"dp_shard": 2, "zero": 1, "ep": 2},
    {"dp_shard": 2, "zero": 2, "ep": 2},
    {"dp_shard": 2, "zero": 3},
    {"dp_shard": 2, "zero": 3, "ep": 2, "recompute": "full"},
    {"tp": 2},
    {"tp": 2, "ep": 2, "recompute": "full"},
    {"tp": 2, "sp": True},
    {"tp": 2, "sp": True, "ep": 2},
    {"cp": 2, "cp_method": "ring", "ep": 2},
    {"cp": 2, "zero": 1, "ep": 2, "recompute": "full"},
]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sets", [LOSS, BIAS], ids=["loss", "bias"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", *SPLIT])
def test_schedules_beside_every_axis(tmp_path, name, sets):
    layouts = [more for more in BESIDE if name not in SPLIT or more.get("zero", 0) < 2]
    check(tmp_path, 4, [{"pp": 2, "pp_schedule": name} | more for more in layouts], sets)


def test_a_mixture_costs_what_a_token_meets():
    """Two of 32 narrow experts are cheaper than the dense feed-forward: more of their blocks make a stage."""
    moe = {"experts": 32, "top_k": 2, "expert_width": 4, "first_dense_layers": 1}
    model = DECODER | {"layers": 4, "ffn_width": 200, "tied": False, "moe": moe}
    kit = make_kit(model)
    assert isinstance(kit, DecoderKit)
    cut = cut_of(kit.skeleton(torch.float32), kit, LayoutSpec(pp=2))
    assert [sum(name.startswith("blocks.") for name in stage) for stage in cut.keep] == [1, 3]
    shapes = parameter_shapes(DecoderSpec.model_validate(model))
    assert shapes is not None
    assert {shapes[name].block for name in held_by(LayoutSpec(pp=2), shapes, 0, False)} == {None, 0}
