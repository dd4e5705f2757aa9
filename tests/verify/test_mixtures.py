"""The gate on mixtures of experts: every way to balance them, on every product of axes of two ranks."""

from __future__ import annotations

import pytest

from fourfold.spec.training import LayoutSpec
from fourfold.verify.covering import choose
from fourfold.verify.every_layout import verify_every_layout
from fourfold.verify.oracles import reduced

MOE = "model.moe={experts=4, top_k=2, shared_experts=1, expert_width=16"
SMALL = ("data.sequence=32", "batch.micro_batch=4")
BIAS = f"{MOE}, balance='bias', router='sigmoid', balance_speed=0.05}}"
LOSS = f"{MOE}, balance_weight=0.3, capacity_factor=0.8}}"


@pytest.mark.parametrize("moe", [BIAS, LOSS], ids=["bias", "loss"])
def test_every_product_of_axes_of_two_ranks(small, tmp_path, moe):
    """And experts that are gathered inside of a block which is computed again, not as often as in its forward."""
    spec = small(*SMALL, moe)
    products = [choice.layout for choice in choose(reduced(spec, 2)[0], 2).products]
    again = LayoutSpec(dp_replicate=1, dp_shard=2, ep=2, zero=2, recompute="selective")
    document = verify_every_layout(spec, 2, steps=2, only=[*products, again], out=tmp_path)
    assert document["verdict"] == "pass", [one["failed"] for one in document["layouts"] if one["failed"]]
    assert document["worst_relative"] < 1e-12
    axes = {
        axis
        for layout in document["layouts"]
        for axis in ("cp", "tp", "zero", "pp", "ep")
        if layout[axis] > 1
    }
    assert axes == {"cp", "tp", "zero", "pp", "ep"}


def test_corrections_are_held_to_the_bit(verb):
    code, document = verb("equal", "--steps", "3", sets=(*SMALL, BIAS, "layout.zero=3"))
    assert code == 0
    found = [f["measured"] for f in document["findings"] if "corrections" in f["claim"]]
    assert found == ["equal: 2 routers"]


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_corrections_of_stages_are_resumed(verb, schedule):
    """Bit for bit, after kills in mid-step: in a V the last rank has no loss, and tells all the same that it is in a
    backward."""
    staged = ("layout.pp=2", f'layout.pp_schedule="{schedule}"', "model.layers=4", "batch.micro_batch=2")
    code, document = verb("resume", sets=(*SMALL, BIAS, *staged))
    assert (code, document["verdict"]) == (0, "pass")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moe", [BIAS, LOSS], ids=["bias", "loss"])
def test_the_whole_gate_of_four_ranks(verb, moe):
    """Every legal ep in every mesh that it can be borrowed from, beside every option."""
    code, document = verb("equal", "--all", "--steps", "2", sets=(*SMALL, moe), world=4)
    assert (code, document["verdict"]) == (0, "pass"), document["first_deviation"]
    assert {layout["ep"] for layout in document["layouts"]} == {1, 2, 4}
    assert document["count"] > 60 and document["worst_relative"] < 1e-12
