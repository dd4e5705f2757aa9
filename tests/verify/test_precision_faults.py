"""Mistakes of precision that no step tells of: the equality gate and the resume check see them."""

from __future__ import annotations

import pytest

from fourfold.verify.resume import verify_resume

FAULTS = "tests.train.precision_faults"


@pytest.mark.parametrize(
    ("fault", "phases"),
    [("reduced_in_bf16", {"gradient before clipping"}), ("norms_in_bf16", {"forward"})],
)
def test_narrow_arithmetic_where_none_was_asked_for_is_a_deviation(verb, score, fault, phases):
    code, document = verb("equal", "--steps", "1", fault=f"{FAULTS}:{fault}")
    score[fault] = code == 3
    assert (code, document["verdict"]) == (3, "fail")
    assert document["first_deviation"]["phase"] in phases
    assert document["worst_relative"] > 1e-4


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [None, "scale_not_restored"])
def test_a_scale_that_is_lost_on_the_way_is_found(small, score, tmp_path, fault):
    # It grows with every step, so that a new run's is another.
    spec = small("precision.compute=fp16", "precision.scale_start=16.0", "precision.scale_every=1")
    document = verify_resume(spec, 1, out=tmp_path, setup=fault and f"{FAULTS}:{fault}")
    score[fault or "clean resume in fp16"] = document["verdict"] == ("fail" if fault else "pass")
    assert document["verdict"] == ("fail" if fault else "pass")
    if fault:
        assert "step 3, loss scale: 16.0 in place of 64.0" in str(document["findings"])
