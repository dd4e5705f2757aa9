"""The gates hold compiled blocks to the same as blocks as they are; what is wrong in one is placed there."""

from __future__ import annotations

import pytest

from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.verify.exact import deviation, verify_exact
from fourfold.verify.exact_rank import train_exactly
from tests.parallel.memory_jobs import TINY

SMALL = ("data.sequence=32", "optimizer.eps=1e-5", "batch.micro_batch=2")
GRAPHS = ("layout.compile=blocks", "layout.compile_backend=aot_eager")
KERNELS = ("layout.compile=blocks",)
CLEAN = [
    ("layout.tp=2", "layout.sp=true", *GRAPHS),
    ("layout.cp=2", "layout.recompute=full", *GRAPHS),
    ("layout.pp=2", *GRAPHS),
    ("layout.dp_shard=2", "layout.zero=3", "layout.recompute=full", *KERNELS),
]
EXACT = ("batch.global_batch=8", "batch.micro_batch=1", "run.exact=true", "model.dropout=0.1", *GRAPHS)


def test_what_is_wrong_in_a_compiled_block_is_placed_there(verb, score):
    sets = (*SMALL, *GRAPHS, "layout.dp_shard=2", "layout.zero=3")
    code, document = verb(
        "equal", "--steps", "1", fault="tests.verify.faults.step_faults:dropout_by_local_row", sets=sets
    )
    score["dropout_by_local_row"] = code == 3
    assert code == 3
    found = document["first_deviation"]
    assert (found["step"], found["rank"], found["phase"], found["place"]) == (1, 1, "forward", "blocks.0")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sets", CLEAN, ids=str)
def test_the_gate_passes(verb, score, sets):
    code, document = verb("equal", "--steps", "2", sets=(*SMALL, *sets))
    score[f"clean {sets}"] = code == 0
    assert code == 0, document["first_deviation"] or document["findings"]


def bits(ranks, world, *sets):
    spec = settle(load_spec("tiny", (*TINY, *EXACT, *sets)).spec, world)
    return ranks(world).run(train_exactly, spec, 2)[0]


def test_the_same_bits_with_compiled_blocks(ranks):
    alone = bits(ranks, 1)
    assert deviation(alone, bits(ranks, 2, "layout.zero=3", "layout.recompute=full")) == ""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sets", [(), ('layout.recompute="full"',), ("precision.compute=bf16",)], ids=str)
def test_fused_kernels_have_the_same_bits(tmp_path, sets):
    spec = load_spec("tiny", (*TINY, "batch.global_batch=8", "batch.micro_batch=1", *KERNELS, *sets)).spec
    document = verify_exact(spec, 8, steps=3, out=tmp_path)
    assert document["verdict"] == "pass"
    assert len({entry["sha256"] for entry in document["layouts"]}) == 1
