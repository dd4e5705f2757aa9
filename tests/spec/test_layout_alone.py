"""A layout without a Spec around it."""

from __future__ import annotations

import pytest

from fourfold.spec.errors import SpecError
from fourfold.spec.layout_alone import layout_alone
from fourfold.spec.training import LayoutSpec


def test_settings_and_what_the_world_leaves() -> None:
    assert layout_alone(["layout.pp=2", "layout.tp=2"], 8) == (LayoutSpec(pp=2, dp_replicate=2, tp=2), 8)


def test_no_settings() -> None:
    assert layout_alone([], 1) == (LayoutSpec(dp_replicate=1), 8)
    assert layout_alone(["hardware.devices_per_node=4"], 1).devices_per_node == 4


def test_rules_about_models_do_not_count() -> None:
    assert layout_alone(["layout.tp=4", "layout.ep=2", "layout.pp=99"], 396).layout.ep == 2


def test_rules_about_layouts_do() -> None:
    with pytest.raises(SpecError) as error:
        layout_alone(["layout.dp_shard=2", "layout.sp=true"], 2)
    assert [problem.asked for problem in error.value.problems] == [
        "layout.dp_shard = 2 with layout.zero = 0",
        "layout.sp = true with layout.tp = 1",
    ]


def test_settings_of_other_sections_are_refused() -> None:
    with pytest.raises(SpecError) as error:
        layout_alone(["cp=2", "model.layers=3", "hardware.device='cpu'"], 2)
    assert [problem.where for problem in error.value.problems] == ["--set #1", "--set #2", "--set #3"]
    assert error.value.problems[0].instead == "--set layout.cp=2"
