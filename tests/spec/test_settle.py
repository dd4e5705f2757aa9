"""Settling: "auto" degrees and the third number of the batch, with the arithmetic shown where it does not hold."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.rules import check
from fourfold.spec.settle import data_parallel_degree, settle
from fourfold.spec.spec import Spec
from fourfold.spec.training import BatchSpec, LayoutSpec

TINY = load_spec("tiny").spec


def with_batch(*, layout: LayoutSpec | None = None, **batch: int) -> Spec:
    return TINY.model_copy(update={"batch": BatchSpec(**batch), "layout": layout or LayoutSpec()})


def numbers(spec: Spec) -> tuple[int | None, int | None, int | None]:
    return spec.batch.global_batch, spec.batch.micro_batch, spec.batch.accumulation


def problem(spec: Spec, world: int, **provenance: str) -> Problem:
    with pytest.raises(SpecError) as caught:
        settle(spec, world, {f"batch.{key}": place for key, place in provenance.items()})
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("given_numbers", "world", "settled"),
    [
        ({"global_batch": 48, "micro_batch": 2}, 4, (48, 2, 6)),
        ({"global_batch": 48, "accumulation": 3}, 4, (48, 4, 3)),
        ({"micro_batch": 2, "accumulation": 3}, 4, (24, 2, 3)),
        ({"global_batch": 48, "micro_batch": 2, "accumulation": 6}, 4, (48, 2, 6)),
        ({"global_batch": 48}, 4, (48, 12, 1)),
        ({"micro_batch": 2}, 4, (8, 2, 1)),
        ({"micro_batch": 1}, 1, (1, 1, 1)),
    ],
)
def test_two_numbers_give_the_third(
    given_numbers: dict[str, int], world: int, settled: tuple[int, int, int]
) -> None:
    assert numbers(settle(with_batch(**given_numbers), world)) == settled


def test_auto_takes_what_the_world_leaves() -> None:
    assert settle(TINY, 6).layout.dp_replicate == 6
    layout = LayoutSpec(pp=2, tp=2, dp_replicate=2, dp_shard="auto", zero=3)
    settled = settle(with_batch(micro_batch=2, layout=layout), 24).layout
    assert (settled.dp_shard, data_parallel_degree(settled)) == (3, 6)


def test_context_parallel_ranks_share_samples() -> None:
    settled = settle(with_batch(global_batch=8, layout=LayoutSpec(cp=2)), 8)
    assert numbers(settled) == (8, 2, 1)


def test_inconsistent_numbers_show_the_arithmetic() -> None:
    spec = with_batch(global_batch=48, micro_batch=2, accumulation=4)
    found = problem(spec, 2, global_batch="tiny.toml:22", accumulation="--set #1")
    assert found.found == "48 != 2 x 4 x 2 = 16"
    assert found.where == "--set #1"
    ways = ["--set batch.global_batch=16", "--set batch.accumulation=12", "--set batch.micro_batch=6"]
    assert found.instead == " or ".join(ways)


def test_indivisible_numbers_show_the_nearest() -> None:
    found = problem(with_batch(global_batch=50, micro_batch=4), 2)
    assert found.found == "50 / (4 x 2) = 6.25"
    assert "--set batch.global_batch=48 or --set batch.global_batch=56" in found.instead
    assert "--set batch.micro_batch=5 or --set batch.micro_batch=1" in found.instead

    found = problem(with_batch(global_batch=3), 4)
    assert found.found == "3 / (1 x 4) = 0.75"
    assert found.instead == "--set batch.global_batch=4"

    found = problem(with_batch(global_batch=50, accumulation=3), 2)
    assert "so micro_batch would be no whole number" in found.why


@pytest.mark.parametrize("numbers_given", [{}, {"accumulation": 3}])
def test_no_samples_given(numbers_given: dict[str, int]) -> None:
    found = problem(with_batch(**numbers_given), 2)
    assert "no batch.global_batch and no batch.micro_batch" in found.found
    assert found.instead.endswith("--set batch.micro_batch=8")


@pytest.mark.parametrize(
    ("layout", "world"),
    [(LayoutSpec(tp=2), 3), (LayoutSpec(dp_replicate=2), 4), (LayoutSpec(), 0), (LayoutSpec(), -2)],
)
def test_degrees_that_do_not_fill_the_world(layout: LayoutSpec, world: int) -> None:
    with pytest.raises(SpecError):
        settle(with_batch(micro_batch=2, layout=layout), world)


def test_rules_that_need_the_world() -> None:
    unsharded = with_batch(micro_batch=2, layout=LayoutSpec(dp_replicate=1, dp_shard="auto"))
    assert settle(unsharded, 1).layout.dp_shard == 1
    with pytest.raises(SpecError, match="zero = 0 keeps every tensor whole"):
        settle(unsharded, 2)


def test_an_unsettled_layout_has_no_data_parallel_degree() -> None:
    with pytest.raises(AssertionError):
        data_parallel_degree(LayoutSpec())


DEGREE = st.integers(1, 4)


@given(DEGREE, DEGREE, DEGREE, DEGREE, DEGREE, st.sampled_from(["dp_replicate", "dp_shard"]), DEGREE, DEGREE)
def test_settled_is_consistent_and_settles_to_itself(
    pp: int, replicate: int, shard: int, cp: int, tp: int, auto: str, micro: int, accumulation: int
) -> None:
    assume(tp != 3 and cp != 3)
    degrees = {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
    world = pp * replicate * shard * cp * tp
    layout = LayoutSpec.model_validate({**degrees, auto: "auto", "zero": int(shard > 1)})
    spec = with_batch(micro_batch=micro, accumulation=accumulation, layout=layout)
    settled = settle(spec, world)
    assert {axis: getattr(settled.layout, axis) for axis in degrees} == degrees
    assert settled.batch.global_batch == micro * accumulation * replicate * shard
    assert settle(settled, world) == settled
    assert settle(settled, world) is not spec


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12))
def test_advice_on_the_batch_works(whole: int, micro: int, world: int) -> None:
    spec = with_batch(global_batch=whole, micro_batch=micro)
    try:
        settle(spec, world)
        return
    except SpecError as error:
        advice = re.findall(r"batch\.(\w+)=(\d+)", error.problems[0].instead)
    assert advice
    for key, value in advice:
        settle(spec.model_copy(update={"batch": spec.batch.model_copy(update={key: int(value)})}), world)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_advice_on_three_numbers_works(whole: int, micro: int, accumulation: int, world: int) -> None:
    spec = with_batch(global_batch=whole, micro_batch=micro, accumulation=accumulation)
    if whole == micro * accumulation * world:
        assert numbers(settle(spec, world)) == (whole, micro, accumulation)
        return
    advice = re.findall(r"batch\.(\w+)=(\d+)", problem(spec, world).instead)
    for key, value in advice:
        settle(spec.model_copy(update={"batch": spec.batch.model_copy(update={key: int(value)})}), world)


def test_a_batch_and_a_layout_that_are_wrong_are_told_together() -> None:
    spec = with_batch(global_batch=6, micro_batch=2, layout=LayoutSpec(dp_replicate=1, dp_shard="auto"))
    with pytest.raises(SpecError) as caught:
        settle(spec, 4, {"layout.dp_shard": "tiny.toml:7", "layout.dp_replicate": "tiny.toml:6"})
    assert [problem.found for problem in caught.value.problems] == [
        "6 / (2 x 4) = 0.75",
        "ranks to shard over, and nothing to shard",
    ]
    assert caught.value.problems[1].where == "tiny.toml:7"


def test_what_was_computed_is_left_open_in_what_is_told() -> None:
    """dp_replicate came from the world, and the accumulation too: neither is typed."""
    settled = settle(TINY.model_copy(update={"layout": LayoutSpec(pp=2)}), 4)
    settled = settled.model_copy(update={"model": settled.model.model_copy(update={"layers": 1})})
    (typed,) = check(
        settled, "train", {"layout.pp": "--set #1", "batch.global_batch": "", "batch.micro_batch": ""}
    )
    assert typed.instead == "--set layout.pp=1"
    (settled_as_typed,) = check(settled, "train")
    assert settled_as_typed.instead.splitlines()[0] == "--set layout.dp_replicate=4 --set layout.pp=1"
