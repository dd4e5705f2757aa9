"""A rehearsed step holds and sends what a real one does, to the byte; what it cannot be is refused, or told."""

from __future__ import annotations

import pytest

from fourfold.plan.rehearsal import Rehearsal
from fourfold.plan.state_bytes import rank_bytes
from fourfold.spec.errors import FourfoldError, SpecError
from fourfold.train.rehearsal import Unreadable, rehearse
from tests.train import rehearsal_jobs

BATCH = ("batch.global_batch=16",)
BATCH_BYTES = 2048  # a real batch comes from arrays, and is not seen to begin
LAYOUTS = [
    pytest.param((*BATCH, "layout.bucket_mib=0.01"), id="ddp"),
    pytest.param((*BATCH, "layout.dp_shard=2", "layout.dp_replicate=2", "layout.zero=3"), id="hsdp"),
    pytest.param((*BATCH, "layout.tp=2", "layout.sp=true", "layout.zero=2"), id="tp-sp-zero2"),
    pytest.param((*BATCH, "layout.zero=3", "layout.recompute=full"), id="zero3-recompute"),
    pytest.param((*BATCH, "layout.pp=2", "layout.zero=2", "batch.accumulation=4"), id="pp-zero2"),
]
MOE = "model.moe={experts=4, top_k=2, shared_experts=1, balance='bias'}"
MORE = [
    ("layout.unused_parameters=true", "layout.bucket_mib=0.01"),
    ("run.exact=true", "layout.bucket_mib=0.01", "batch.micro_batch=1"),
    ("run.exact=true", "layout.zero=3", "batch.micro_batch=1"),
    ("run.exact=true", "layout.dp_shard=2", "layout.dp_replicate=2", "layout.zero=2"),
    ("precision.compute=bf16", "precision.reduce=bf16", "layout.bucket_mib=0.01"),
    ("precision.compute=fp16", "precision.parameters=compute", "layout.zero=3"),
    ("layout.zero=1", "layout.unused_parameters=true"),
    ("layout.zero=2", "layout.offload=disk"),
    ("layout.zero=3", "layout.wrap=2", "layout.prefetch=1"),
    ("layout.zero=3", "layout.wrap=model"),
    ("layout.zero=3", "layout.tp=2", "batch.micro_batch=1"),
    ("layout.tp=2", "layout.offload=disk"),
    ("layout.tp=4", "layout.sp=true", "model.kv_heads=1"),
    ("layout.cp=2", "layout.zero=3"),
    ("layout.cp=2", "layout.cp_method=ring", "layout.tp=2", "layout.sp=true"),
    ("layout.cp=4", "layout.cp_method=ulysses"),
    ("layout.pp=2", "batch.accumulation=4", 'layout.pp_schedule="gpipe"', "layout.zero=3"),
    ("layout.pp=2", "layout.tp=2", "layout.sp=true", "model.tied=true"),
    ("layout.pp=2", "batch.accumulation=4", "model.layers=4", 'layout.pp_schedule="zbv"', "layout.zero=1"),
    ("layout.pp=4", "batch.accumulation=8", "model.layers=4"),
    ("layout.recompute=full", "layout.bucket_mib=0.01"),
    ("layout.recompute=selective",),
    ("layout.recompute=selective", "layout.tp=2", "layout.sp=true", "layout.zero=3"),
    ("layout.recompute=full", "layout.tp=2", "layout.zero=1"),
    ("layout.recompute=full", "layout.cp=2", "layout.cp_method=ring", "layout.zero=3"),
    ("layout.recompute=selective", "layout.cp=2", 'layout.recompute_keep=["collective", "mm"]'),
    ("layout.recompute=full", "precision.compute=bf16", "precision.parameters=compute"),
    ("layout.recompute=selective", "precision.compute=bf16", "layout.zero=3"),
    (MOE,),
    (MOE, "layout.zero=3"),
    (MOE, "layout.zero=3", "layout.ep=2", "layout.dp_shard=2", "layout.dp_replicate=2"),
    (MOE, "layout.zero=2", "layout.ep=4", "layout.tp=2", "layout.sp=true"),
    (MOE, "layout.cp=2", "layout.ep=2"),
    (MOE, "layout.pp=2", "layout.tp=2", "layout.sp=true", "layout.ep=2"),
    (MOE, "layout.pp=2", "layout.zero=3", "layout.ep=2"),
    (
        *(MOE, "model.moe.balance=loss", "layout.pp=2", "model.layers=4"),
        *('layout.pp_schedule="zbv"', "layout.zero=1"),
    ),
    (
        MOE,
        "layout.tp=2",
        "layout.cp=2",
        "layout.sp=true",
        "model.moe.balance=loss",
        "model.moe.capacity_factor=2.0",
    ),
    (
        'model={kind="mlp", inputs=5, hidden=7, layers=3}',
        'data={kind="synthetic", samples=40}',
        "layout.zero=3",
    ),
]


def told(traffic, routed):
    """How many tokens travel to experts depends on their values: a rehearsal takes equally many to each."""
    if routed and traffic.kind == "all-to-all":
        return traffic.model_copy(update={"bytes": 0, "sent_bytes": 0})
    return traffic


def compare(ranks, sets):
    """Rank 0 of four, real and rehearsed."""
    rehearsed = rehearse(rehearsal_jobs.asked(sets, 4))
    assert isinstance(rehearsed, Rehearsal)
    traffic, most = ranks(4).run(rehearsal_jobs.real, sets)[0]
    routed = any("layout.ep" in setting for setting in sets)
    assert [told(each, routed) for each in rehearsed.traffic] == [told(each, routed) for each in traffic]
    assert rehearsed.state == rank_bytes(rehearsal_jobs.asked(sets, 4), 0)
    in_memory = most - rehearsed.peak_state["on disk"]  # a mapped file is a tensor, too
    # What is under way between ranks is held a little longer in a real step, sometimes.
    slack = 0.1 if routed else 0.0  # tokens go where they choose to
    assert (0.94 - slack) * in_memory <= rehearsed.peak_bytes <= (1.01 + slack) * in_memory + BATCH_BYTES
    assert (
        rehearsed.peak_bytes
        == sum(rehearsed.peak_state.values())
        + rehearsed.peak_beside_bytes
        - (rehearsed.peak_state["on disk"])
    )


@pytest.mark.parametrize("sets", LAYOUTS)
def test_a_rehearsed_step_is_like_a_real_one(ranks, sets):
    compare(ranks, sets)


@pytest.mark.long
@pytest.mark.parametrize("sets", MORE, ids=str)
def test_other_rehearsed_steps_are_too(ranks, sets):
    compare(ranks, (*BATCH, *sets))


def test_activations_that_are_computed_again_are_not_kept():
    kept, most = [], []
    for mode in ("full", "selective", '"none"'):
        found = rehearse(rehearsal_jobs.asked(("data.sequence=128", *BATCH, f"layout.recompute={mode}"), 4))
        assert isinstance(found, Rehearsal)
        kept.append(found.activations_bytes)
        most.append(found.peak_bytes)
    assert kept == sorted(kept) and kept[0] < kept[1] / 2 < kept[2] / 2
    assert most[0] < most[1] < most[2]


def test_microbatches_between_the_first_and_the_last_are_counted_and_not_computed():
    few, many = (
        rehearse(rehearsal_jobs.asked(("layout.zero=3", f"batch.global_batch={8 * count}"), 4))
        for count in (3, 7)
    )
    assert isinstance(few, Rehearsal)
    assert isinstance(many, Rehearsal)
    for one, other in zip(few.traffic, many.traffic, strict=True):
        assert (one.kind, one.over) == (other.kind, other.over)
    counts = {each.kind: each.count for each in many.traffic}
    units = 4  # three blocks, and what is outside them
    assert counts == {"all-reduce": 2, "all-gather": 7 * (2 * units - 1), "reduce-scatter": 7 * units}
    assert few.peak_bytes == many.peak_bytes


def test_any_world_is_rehearsed_in_one_process():
    sets = ("layout.zero=3", "layout.dp_shard=256", "layout.tp=4", "model.kv_heads=4", "batch.micro_batch=1")
    spec = rehearsal_jobs.asked((*sets, "batch.global_batch=2048"), 8192)
    found = rehearse(spec)
    assert isinstance(found, Rehearsal)
    assert found.state == rank_bytes(spec, 0)
    assert {each.over: each.ranks for each in found.traffic} == {
        "world": 8192,
        "dp_shard": 256,
        "tp": 4,
        "dp_replicate": 8,
    }


def own(tmp_path, target, *sets):
    file = tmp_path / "own.toml"
    file.write_text(
        f'name = "own"\n[model]\nkind = "import"\ntarget = "tests.train.rehearsal_jobs:{target}"\n'
        '[data]\nkind = "stdlib"\nsequence = 16\n[batch]\nglobal_batch = 8\n[run]\nsteps = 3\n'
        "[optimizer]\nwarmup_steps = 0\n"
    )
    return rehearsal_jobs.asked(sets, 4, str(file))


def test_a_model_of_ones_own_is_rehearsed_and_may_pick_targets_by_a_mask(tmp_path):
    found = rehearse(own(tmp_path, "printing"))
    assert isinstance(found, Rehearsal)
    assert found.parameters == 256 * 8
    assert found.state["after init"]["parameters"] == 4 * 256 * 8


def test_a_model_that_reads_values_cannot_be_rehearsed_and_that_is_told(tmp_path):
    found = rehearse(own(tmp_path, "reads"))
    assert isinstance(found, Unreadable)
    assert "rehearsal_jobs.py:" in found.why
    assert (found.parameters, found.held["parameters"]) == (256 * 8, 4 * 256 * 8)


def test_a_model_that_cannot_be_computed_is_refused_with_the_place(tmp_path):
    with pytest.raises(FourfoldError, match=r"rehearsal_jobs\.py:\d+") as refused:
        rehearse(own(tmp_path, "wrong"))
    assert refused.value.exit_code == 1, "an error of the user's own code, as in a run"
    assert "in loss" in str(refused.value.__cause__), "its traceback, for --debug"


def test_a_sharding_table_that_cuts_nothing_is_refused_as_a_run_would(tmp_path):
    with pytest.raises(SpecError, match="sharding table cuts nothing"):
        rehearse(own(tmp_path, "printing", "layout.dp_replicate=2", "layout.tp=2"))
