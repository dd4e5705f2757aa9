"""The shipped command on mixtures of experts: every way to balance them, on every layout of two ranks."""

from __future__ import annotations

import pytest

MOE = "model.moe={experts=4, top_k=2, shared_experts=1, expert_width=16"
SMALL = ("data.sequence=32", "batch.micro_batch=4")
BIAS = f"{MOE}, balance='bias', router='sigmoid', balance_speed=0.05}}"
LOSS = f"{MOE}, balance_weight=0.3, capacity_factor=0.8}}"


@pytest.mark.parametrize("moe", [BIAS, LOSS], ids=["bias", "loss"])
def test_every_layout_of_two_ranks(verb, score, moe):
    code, document = verb("equal", "--all", "--steps", "2", sets=(*SMALL, moe))
    score[f"clean {moe}"] = code == 0
    assert (code, document["verdict"]) == (0, "pass"), document["first_deviation"]
    assert document["worst_relative"] < 1e-12
    axes = {axis for layout in document["layouts"] for axis in ("cp", "tp", "sp", "zero") if layout[axis] > 1}
    assert {"cp", "tp", "zero"} <= axes


def test_corrections_are_held_to_the_bit(verb):
    code, document = verb("equal", "--steps", "3", sets=(*SMALL, BIAS, "layout.zero=3"))
    assert code == 0
    found = [f["measured"] for f in document["findings"] if "corrections" in f["claim"]]
    assert found == ["equal: 2 routers"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_layout_of_four_ranks(verb, score):
    """Every legal ep in every mesh that it can be borrowed from."""
    code, document = verb("equal", "--all", "--steps", "2", sets=(*SMALL, LOSS), world=4)
    score["clean four ranks"] = code == 0
    assert (code, document["verdict"]) == (0, "pass"), document["first_deviation"]
    assert {layout["ep"] for layout in document["layouts"]} == {1, 2, 4}
    assert document["count"] > 90 and document["worst_relative"] < 1e-12
