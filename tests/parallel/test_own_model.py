"""A user's own model under ZeRO and tensor parallel: made in parts if its kit can, else whole and then cut."""

from __future__ import annotations

import pytest

from tests.parallel import own_jobs

LAYOUTS = [{"dp_shard": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "sp": True}]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_parts", [True, False])
def test_the_example_equals_one_device(ranks, layout, in_parts):
    told = ranks(2).run(own_jobs.trained, {"dp_replicate": 1} | layout, in_parts)
    for way, worst in told:
        assert way == ("boxes" if in_parts else "whole")
        assert worst < 1e-12


def test_a_buffer_of_a_skeleton_keeps_its_values(ranks):
    for layout in LAYOUTS[:2]:
        assert all(ranks(2).run(own_jobs.keeps_a_buffer, {"dp_replicate": 1} | layout))


def test_a_module_alone_is_sharded_whole_and_refused_by_tensor_parallel(ranks):
    told = ranks(2).run(own_jobs.module_alone)
    assert all(text == "trained" for text, _ in told)
    assert all("layout.tp = 2" in text and "docs/own_model.md" in text for _, text in told)
