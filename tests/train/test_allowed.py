"""In what a checkpoint may differ from the model: only in what the Spec names, and never in half of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.spec.errors import DataError
from fourfold.spec.training import CheckpointSpec
from fourfold.train.allowed import allowed

SLOTS = ("exp_avg", "exp_avg_sq", "step")


def names(*parts: str, moments: bool = True) -> list[str]:
    slots = [f"optimizer.{part}.{slot}" for part in parts for slot in SLOTS] if moments else []
    return [*(f"model.{part}" for part in parts), *slots, "rank0.torch"]


def test_nothing_is_allowed_that_is_not_named():
    assert allowed(CheckpointSpec(), names("a"), names("b")) == ((), (), ())


def test_what_was_added_is_initial_and_what_was_taken_away_goes_with_its_moments():
    spec = CheckpointSpec(allow_missing=("model.new.*", "model.b"), allow_surplus=("model.old.w",))
    held, wanted = names("a", "old.w"), [*names("a"), "model.new.w", "model.new.b"]
    leave = allowed(spec, held, wanted)
    assert leave.initial == ("model.new.b", "model.new.w")
    assert leave.left_out == ("model.old.w", *(f"optimizer.old.w.{slot}" for slot in SLOTS))
    assert leave.unused == ("checkpoint.allow_missing: model.b",)
    assert leave.another_model


def test_moments_of_a_tensor_that_stays_do_not_go_with_another():
    """A parameter that was frozen since: its moments are left over, and only their own name allows that."""
    held, wanted = names("a"), names("a", moments=False)
    assert allowed(CheckpointSpec(allow_surplus=("model.a",)), held, wanted).left_out == ()
    leave = allowed(CheckpointSpec(allow_surplus=("optimizer.a.*",)), held, wanted)
    assert leave.left_out == tuple(f"optimizer.a.{slot}" for slot in SLOTS)
    assert not leave.another_model


def test_all_moments_of_a_parameter_or_none():
    held, wanted = names("a", moments=False), names("a")
    spec = CheckpointSpec(allow_missing=("optimizer.a.*",))
    assert allowed(spec, held, wanted).initial == tuple(f"optimizer.a.{slot}" for slot in SLOTS)
    with pytest.raises(DataError, match="go on with some of the optimizer's state of a"):
        allowed(spec, [*held, "optimizer.a.step"], wanted)


@given(
    held=st.sets(st.sampled_from(names("a", "b.c", "d"))),
    wanted=st.sets(st.sampled_from(names("a", "b.c", "d"))),
    missing=st.sets(st.sampled_from(["model.*", "model.b.?", "optimizer.*", "model.d"])),
    surplus=st.sets(st.sampled_from(["model.*", "optimizer.a.*", "model.b.c"])),
)
def test_only_what_differs_is_ever_told(
    held: set[str], wanted: set[str], missing: set[str], surplus: set[str]
):
    spec = CheckpointSpec(allow_missing=tuple(sorted(missing)), allow_surplus=tuple(sorted(surplus)))
    try:
        leave = allowed(spec, held, wanted)
    except DataError:
        assert any(f"optimizer.{part}.{slot}" in held for part in ("a", "b.c", "d") for slot in SLOTS)
        return
    assert set(leave.initial) <= wanted - held
    assert set(leave.left_out) <= held - wanted
    assert not any(name.startswith("rank") for name in (*leave.initial, *leave.left_out))
    if "model.*" in missing:
        assert {name for name in wanted - held if name.startswith("model.")} <= set(leave.initial)
