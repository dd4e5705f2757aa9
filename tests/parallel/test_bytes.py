"""What ranks really hold, by category and instant, is what was predicted, to the byte."""

from __future__ import annotations

import pytest
import torch

from fourfold.models.protocol import LossModule
from fourfold.parallel.apply import parallelize
from fourfold.parallel.bytes import held
from fourfold.plan.state_bytes import CATEGORIES, INSTANTS
from fourfold.spec.training import LayoutSpec
from tests.parallel import memory_jobs
from tests.parallel.one_device import CPU, DECODER, make_kit

MLP = ('model={kind="mlp", inputs=5, hidden=7, layers=3}', 'data={kind="synthetic", samples=40}')
MOE = (
    "model.moe={experts=4, top_k=2, shared_experts=1, first_dense_layers=1, expert_width=12, balance='bias'}",
    "model.biases=true",
)
STAGED = (*MOE, "layout.pp=2")
BATCH = ("batch.global_batch=16",)
TWO = [
    (),
    ("layout.bucket_mib=0.01",),
    ("layout.zero=1",),
    ("layout.zero=2",),
    ("layout.zero=3",),
    ("layout.zero=2", "layout.wrap=2"),
    ("layout.zero=3", "layout.wrap=model"),
    ("layout.zero=3", "layout.prefetch=2", "layout.offload=disk"),
    ("layout.offload=disk",),
    ("layout.zero=1", "precision.compute=bf16", "precision.parameters=compute"),
    ("layout.zero=2", "precision.compute=bf16", "precision.parameters=compute", "layout.wrap=3"),
    ("layout.zero=2", "precision.compute=fp64"),
    (*MOE,),
    (*MOE, "layout.zero=2"),
    (*MOE, "layout.zero=3"),
    (*MOE, "layout.zero=3", "layout.ep=2"),
    (*MOE, "layout.tp=2", "layout.ep=2"),
    (*MLP,),
    (*MLP, "layout.zero=2"),
    (*MLP, "layout.zero=3", "layout.wrap=2"),
    ("run.exact=true",),
    ("run.exact=true", "layout.zero=3"),
]
FOUR = [
    ("run.exact=true", "layout.zero=1"),
    ("run.exact=true", "layout.zero=2", "layout.dp_shard=2", "layout.dp_replicate=2"),
    (*MOE, "run.exact=true", "layout.zero=3"),
    ("layout.zero=2", "layout.dp_shard=2", "layout.dp_replicate=2"),
    ("layout.zero=3", "layout.dp_shard=2", "layout.dp_replicate=2"),
    ("layout.zero=3", "layout.dp_shard=2", "layout.tp=2"),
    ("layout.zero=1", "layout.dp_shard=2", "layout.tp=2", "layout.sp=true"),
    ("layout.dp_replicate=2", "layout.tp=2"),
    ("layout.tp=4",),
    (*MOE, "layout.zero=3", "layout.dp_shard=2", "layout.tp=2"),
    (*MOE, "layout.zero=2", "layout.dp_shard=2", "layout.tp=2", "layout.ep=2"),
    (*MOE, "layout.zero=1", "layout.dp_shard=2", "layout.dp_replicate=2", "layout.ep=2"),
    (*MOE, "layout.cp=2", "layout.dp_replicate=2", "layout.ep=2"),
    (*MOE, "layout.tp=4", "layout.ep=2"),
    (*MOE, "model.moe.experts=6", "layout.zero=3", "layout.ep=2"),
    (*MOE, "model.moe.experts=3", "layout.zero=2"),  # each expert is cut: there are fewer than ranks
    (*STAGED, "layout.dp_shard=2", "layout.zero=2", "layout.ep=2"),
    (*STAGED, "layout.tp=2", "layout.ep=2", "layout.pp_split=[1,2]"),
    (*STAGED, "layout.dp_shard=2", "layout.zero=1", 'layout.pp_schedule="zbv"', "model.layers=4"),
]


def check(found, staged=False):
    for measured, predicted in found:
        assert {**measured} == {**predicted}
        assert tuple(predicted) == tuple(at for at in INSTANTS if not staged or at != "between microbatches")


@pytest.mark.parametrize("sets", TWO, ids=str)
def test_two_ranks_hold_what_was_predicted(ranks, sets):
    check(ranks(2).run(memory_jobs.measured, *BATCH, *sets))


@pytest.mark.long
@pytest.mark.parametrize("sets", FOUR, ids=str)
def test_four_ranks_hold_what_was_predicted(ranks, sets):
    check(ranks(4).run(memory_jobs.measured, *BATCH, *sets), staged="layout.pp=2" in sets)


def test_a_storage_counts_once():
    kit = make_kit(DECODER)  # tied
    module = LossModule(kit, kit.build(1, torch.float64))
    parallel = parallelize(module, LayoutSpec(dp_replicate=1), CPU)
    whole = 8 * sum(p.numel() for p in module.parameters())
    assert held(parallel, []) == dict.fromkeys(CATEGORIES, 0) | {"parameters": whole}
    flat = torch.zeros(100, dtype=torch.float64)
    for parameter in module.parameters():
        parameter.grad = flat[:1].expand_as(parameter)
    step = torch.zeros(())
    found = held(parallel, [flat[5:9], torch.zeros(3), step, step])
    assert (found["gradients"], found["moments"], found["other"]) == (800, 12, 4)
