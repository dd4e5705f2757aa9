"""Exact mode: the same bits on any power of two of data-parallel ranks; and mistakes in it are found."""

from __future__ import annotations

import json

import pytest

from fourfold.spec.errors import SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.spec.training import LayoutSpec
from fourfold.verify.exact import deviation, digest_of, exact_layouts, verify_exact
from fourfold.verify.exact_rank import RunBits, StepBits, train_exactly
from fourfold.verify.layout_words import words
from tests.parallel.memory_jobs import TINY

BATCH = (
    "batch.global_batch=24",
    "batch.micro_batch=1",
    "run.exact=true",
    "model.dropout=0.1",
    "model.tied=true",
)
SPLITS = [
    (2, ()),
    (2, ("layout.zero=1",)),
    (2, ("layout.zero=2", "layout.recompute=full")),
    (2, ("layout.zero=3", "layout.wrap=2")),
    (4, ("layout.bucket_mib=0.02",)),
    (4, ("layout.dp_shard=2", "layout.dp_replicate=2", "layout.zero=3")),
]
MODELS = [
    ("precision.compute=bf16",),
    ("precision.compute=fp16", "precision.parameters=compute"),
    ("model.moe={experts=3, top_k=2, balance='bias'}",),
]


def bits(ranks, world, *sets):
    spec = settle(load_spec("tiny", (*TINY, *BATCH, *sets)).spec, world)
    return ranks(world).run(train_exactly, spec, 3)[0]


@pytest.fixture(scope="module")
def of_one(ranks):
    return bits(ranks, 1)


@pytest.mark.parametrize(("world", "sets"), SPLITS, ids=str)
def test_the_same_bits(ranks, of_one, world, sets):
    found = bits(ranks, world, *sets)
    assert deviation(of_one, found) == ""
    assert found == of_one


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_same_bits_of_other_models(ranks, model):
    assert deviation(bits(ranks, 1, *model), bits(ranks, 4, *model, "layout.zero=3")) == ""


def test_which_layouts_are_compared():
    assert [words(layout) for layout in exact_layouts(4)] == [
        *("one rank", "dp_replicate 2", "dp_shard 2, zero 1", "dp_shard 2, zero 2", "dp_shard 2, zero 3"),
        *("dp_replicate 4", "dp_shard 4, zero 1", "dp_shard 4, zero 2", "dp_shard 4, zero 3"),
        *(f"dp_replicate 2 × dp_shard 2, zero {zero}" for zero in (1, 2, 3)),
    ]
    for world in (0, 1, 3, 6):
        with pytest.raises(SpecError):
            list(exact_layouts(world))
    assert next(exact_layouts(2)) == LayoutSpec(dp_replicate=1)


def test_the_first_deviation_in_order_is_named():
    step = StepBits("0x1p0", {"a": "1", "b": "2"}, "0x1p1", {"a": "3", "b": "4"})
    first = RunBits((step, step), {"a": "5"})

    def of(**changed):
        parts = {
            "loss": step.loss,
            "gradients": step.gradients,
            "norm": step.norm,
            "parameters": step.parameters,
        }
        return RunBits((step, StepBits(**{**parts, **changed})), first.state)

    assert deviation(first, first) == ""
    assert deviation(first, of(loss="0x1p2")) == "step 2: loss 4.0, on one rank 1.0"
    assert deviation(first, of(gradients={"a": "1", "b": "9"}, norm="0x1p3")) == "step 2: gradient of b"
    assert deviation(first, of(gradients={"a": "1"})) == "step 2: gradient of b"
    assert deviation(first, of(norm="0x1p3")) == "step 2: norm 8.0, on one rank 2.0"
    assert deviation(first, of(parameters={"a": "8", "b": "9"})) == "step 2: a and 1 more after the update"
    assert deviation(first, RunBits(first.steps, {"a": "6"})) == "after the last step: a"
    assert (
        digest_of({"a": "1", "b": "2"}) == digest_of({"b": "2", "a": "1"}) != digest_of({"a": "1", "b": "3"})
    )


def small(*sets):
    return load_spec("tiny", (*TINY, "batch.global_batch=24", "batch.micro_batch=1", *sets)).spec


def test_the_verb_proves_it(tmp_path):
    told = []
    document = verify_exact(small(), 2, steps=2, out=tmp_path, say=told.append)
    assert document["verdict"] == "pass"
    assert len({entry["sha256"] for entry in document["layouts"]}) == 1
    assert len(told) == 5
    written = json.loads((tmp_path / "findings" / "exact.json").read_text())
    assert written["findings"] == document["findings"]


FAULTS = {
    "one_by_one": "step 1: gradient of",
    "ranks_in_turn": "step 1: gradient of",
    "scattered_microbatches": "step 1: gradient of",
    "norm_of_shards": "step 1: norm",
    "fused_update": "after the update",
    "rounded_losses": "loss",
}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_in_exact_mode_is_found(tmp_path, fault):
    document = verify_exact(
        small(), 4, steps=3, out=tmp_path, setup=f"tests.verify.faults.exact_faults:{fault}"
    )
    assert document["verdict"] == "fail"
    failed = [finding["measured"] for finding in document["findings"] if finding["verdict"] == "fail"]
    assert any(FAULTS[fault] in measured for measured in failed), failed


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("sets", [(), ("precision.compute=bf16",)], ids=str)
def test_tiny_after_twenty_steps(tmp_path, sets):
    """Dropout and clipping are the Spec's own."""
    spec = load_spec("tiny", sets).spec
    document = verify_exact(spec, 8, steps=20, out=tmp_path)
    assert document["verdict"] == "pass"
    print(f"{len(document['layouts'])} layouts, sha256 {document['layouts'][0]['sha256']}")
    assert len(document["layouts"]) == 22


@pytest.mark.long
@pytest.mark.timeout(600)
def test_experts(tmp_path):
    assert verify_exact(load_spec("moe-tiny").spec, 4, steps=3, out=tmp_path)["verdict"] == "pass"
