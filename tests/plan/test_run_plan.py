"""The plan of a run: arithmetic, honesty about what is missing, and a round trip through JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.plan.rehearsal import sent_bytes
from fourfold.plan.run_plan import (
    RunPlan,
    make_run_plan,
    state_bytes,
)
from fourfold.plan.state_bytes import element_bytes, rank_bytes
from fourfold.spec.errors import SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.training import PrecisionSpec

COMMAND = ("fourfold", "train", "tiny", "--nproc", "2")
TINY_PARAMETERS = 216_128


def plan_of(name: str, world: int, sets: Sequence[str] = (), nproc: int | None = None) -> RunPlan:
    return make_run_plan(load_spec(name, sets), world, COMMAND, nproc)


def test_tiny_on_two_ranks() -> None:
    plan = plan_of("tiny", 2, ["run.steps=30"])
    assert (plan.world, plan.nproc, plan.command, plan.steps) == (2, 2, COMMAND, 30)
    assert plan.spec.batch.accumulation == 12
    assert plan.spec.layout.dp_replicate == 2
    assert plan.samples_per_step == 48
    assert plan.tokens_per_step == 48 * 128
    assert plan.parameters == TINY_PARAMETERS == sum(plan.parameter_terms.values())
    assert plan.state_bytes is not None
    assert plan.state_bytes.total == 16 * TINY_PARAMETERS
    assert plan.gradient_bytes_per_step == 4 * TINY_PARAMETERS
    assert plan.provenance["run.steps"] == "--set #1"
    assert plan.provenance["batch.micro_batch"].startswith("tiny.toml:")


def test_one_rank_sends_nothing() -> None:
    plan = plan_of("tiny", 1)
    assert plan.gradient_bytes_per_step == 0
    assert plan.spec.batch.accumulation == 24


def test_fp64_doubles_the_state() -> None:
    plan = plan_of("tiny", 2, ["precision.compute=fp64"])
    assert plan.state_bytes is not None
    assert plan.state_bytes.total == 32 * TINY_PARAMETERS
    assert plan.gradient_bytes_per_step == 8 * TINY_PARAMETERS


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(SpecError):
        plan_of("tiny", 5)


@pytest.mark.parametrize("name", ["tiny", "deepseek-v3"])
def test_round_trip(name: str) -> None:
    plan = plan_of(name, 2048 if name == "deepseek-v3" else 2)
    text = plan.model_dump_json()
    assert text.startswith('{"schema":"fourfold.plan/1"')
    assert RunPlan.model_validate_json(text) == plan


def test_what_is_missing_is_said() -> None:
    said = " ".join(plan_of("tiny", 2).not_predicted)
    for word in ("activations", "logits", "buckets", "allocator", "time"):
        assert word in said
    assert "copies of weights" not in said
    assert "bf16 copies of weights" in " ".join(plan_of("tiny", 2, ["precision.compute=bf16"]).not_predicted)


def test_an_imported_model_has_no_figures() -> None:
    sets = [
        "model.kind=import",
        "model.target=package.module:factory",
        "data.kind=synthetic",
        "data.inputs=4",
        "data.outputs=1",
        "data.task=regression",
    ]
    plan = plan_of("tiny", 2, sets)
    assert plan.parameters is None
    assert plan.parameter_terms == {}
    assert plan.state_bytes is None
    assert plan.gradient_bytes_per_step is None
    assert plan.tokens_per_step is None
    assert "known once it is built" in " ".join(plan.not_predicted)
    assert any("left out" in note for note in plan.notes)
    assert "unknown" in str(plan)


def test_a_layout_that_cuts_the_model_has_no_traffic() -> None:
    plan = plan_of("deepseek-v3", 2048, nproc=1)
    assert plan.gradient_bytes_per_step is None
    said = " ".join(plan.not_predicted)
    assert "layout.pp" in said
    assert "layout.zero" in said
    assert "layout.tp" not in said
    assert plan.state_bytes is not None
    # The router's corrections have no gradient and no moments.
    assert plan.state_bytes.parameters - plan.state_bytes.gradients == 4 * 14_848
    assert "a whole copy" in str(plan)


def test_more_ranks_than_cores_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1}, raising=False)
    assert plan_of("tiny", 2).notes == ()
    assert "3 ranks share 2 cores" in plan_of("tiny", 3).notes[0]
    assert plan_of("tiny", 4, nproc=2).notes == ()
    assert plan_of("tiny", 3, ["hardware.device=cuda"]).notes == ()


@pytest.mark.parametrize(("name", "world"), [("tiny", 3), ("deepseek-v3", 2048), ("llama3-405b", 2048)])
def test_it_prints_in_80_columns(name: str, world: int) -> None:
    plan = plan_of(name, world)
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"{plan.parameters:,} parameters" in str(plan)


def test_element_bytes() -> None:
    assert [element_bytes(PrecisionSpec(compute=kind)) for kind in ("fp32", "bf16", "fp16", "fp64")] == [
        4,
        4,
        4,
        8,
    ]


def test_state_bytes_of_nothing() -> None:
    assert state_bytes({}, PrecisionSpec()).total == 0


@settings(deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_all_reduce(payload: int, ranks: int) -> None:
    sent = sent_bytes("all-reduce", payload, ranks)
    assert 0 <= sent * ranks - 2 * (ranks - 1) * payload < ranks


def test_a_run_that_ends_inside_its_warm_up_is_planned_with_a_note():
    plan = make_run_plan(load_spec("tiny", ["run.steps=5"]), 1, ("test",))
    assert any("inside the warm-up of 20 steps" in note for note in plan.notes)
    assert not make_run_plan(load_spec("tiny", ["run.steps=20"]), 1, ("test",)).notes


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ((), "every 100 steps and at the end, 20 global batches"),
        (("run.validate_every=0",), "only at the end (run.validate_every = 0), 20 global batches"),
        (("run.validate_every=0", "data.validation_fraction=0.0"), "never: no data are kept for it"),
        (("run.validation_batches=0",), "every 100 steps and at the end, all global batches"),
    ],
)
def test_it_says_when_it_is_validated(sets: tuple[str, ...], told: str) -> None:
    assert f"validate   {told}" in str(plan_of("tiny", 2, sets))


def test_a_rank_has_its_part_predicted() -> None:
    plan = make_run_plan(load_spec("tiny", ["layout.zero=2", "layout.offload=disk"]), 4, ("test",))
    assert plan.rank_bytes == rank_bytes(plan.spec, 0)
    assert RunPlan.model_validate_json(plan.model_dump_json()) == plan
    row = " ".join(str(plan).split())
    assert "after init; " in row and " after the step; 0.41 MiB on disk" in row
    assert "traffic under layout.dp_shard, layout.zero" in plan.not_predicted
    own = ['model={kind="import", target="a:b"}', "layout.pp=2"]
    assert make_run_plan(load_spec("tiny", own), 4, ("test",)).rank_bytes is None


def test_state_that_is_on_the_cpu_already_is_noted() -> None:
    def notes(*sets: str) -> str:
        return " ".join(make_run_plan(load_spec("tiny", ["layout.zero=3", *sets]), 2, ("test",)).notes)

    assert "moves state off a CUDA device" in notes("layout.offload=cpu")
    assert "CUDA" not in notes("layout.offload=cpu", "hardware.device=cuda") + notes()


def test_a_reduction_in_bf16_sends_half():
    wide, narrow = (
        plan_of("tiny", 2, sets).gradient_bytes_per_step for sets in ([], ["precision.reduce=bf16"])
    )
    assert narrow * 2 == wide
