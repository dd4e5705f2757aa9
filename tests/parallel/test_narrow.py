from __future__ import annotations

import pytest
import torch

from fourfold.models.loss import squared_error
from fourfold.parallel.narrow import Rounded, loss_module, narrow_dtype, policy
from fourfold.spec.training import PrecisionSpec
from tests.parallel import pipeline_jobs
from tests.parallel.plain_kit import PlainKit
from tests.parallel.rank_jobs import Branching
from tests.train import precision_jobs as jobs

BF16, FP32 = "torch.bfloat16", "torch.float32"
NARROW = PrecisionSpec(compute="bf16", parameters="compute")
TP = ("layout.tp=2", "layout.sp=true")


@pytest.mark.parametrize(
    ("layout", "collective"),
    [((), "all_reduce"), (("layout.zero=1",), "reduce_scatter"), (("layout.zero=3",), "reduce_scatter")],
)
def test_gradients_travel_in_what_was_asked_for(ranks, layout, collective):
    for reduce, dtype in (("fp32", FP32), ("bf16", BF16)):
        for compute in ("fp32", "bf16"):
            sets = (
                f"precision.compute={compute}",
                f"precision.reduce={reduce}",
                "precision.parameters=compute",
            )
            for sent in ranks(2).run(jobs.on_the_wire, *sets, *layout):
                if layout or reduce == "bf16":  # torch's DDP reduces fp32 beside Python
                    assert sent[collective] == [dtype]


def test_parameters_are_gathered_in_what_they_take_part_in(ranks):
    for parameters, dtype in (("fp32", FP32), ("compute", BF16)):
        sets = ("precision.compute=bf16", f"precision.parameters={parameters}", "layout.zero=3")
        for sent in ranks(2).run(jobs.on_the_wire, *sets):
            assert sent["all_gather"] == [dtype]


@pytest.mark.parametrize("parameters", ["fp32", "compute"])
def test_a_setting_means_the_same_on_every_layout(ranks, parameters):
    sets = ("precision.compute=bf16", f"precision.parameters={parameters}", "precision.scale_backoff=0.5")
    alone = ranks(1).run(jobs.steps, 2, *sets)[0]
    wide = ranks(1).run(jobs.steps, 2)[0]
    for layout in ((), ("layout.zero=1",), ("layout.zero=3",), TP):
        for seen in ranks(2).run(jobs.steps, 2, *sets, *layout):
            for (loss, norm), (same_loss, same_norm) in zip(seen, alone, strict=True):
                # Tensor parallel adds up products of other lengths in bf16.
                close = 1e-3 if layout == TP else 1e-6
                assert loss == pytest.approx(same_loss, rel=close)
                assert norm == pytest.approx(same_norm, rel=5 * close)
    assert alone != wide


@pytest.mark.long
def test_microbatches_are_added_up_in_fp32_where_their_sum_travels_in_bf16(ranks):
    # Stage 1 and DDP reduce once, after the last microbatch: were microbatches added up in bf16, they would differ.
    one, other = (
        ranks(2).run(jobs.steps, 1, "precision.reduce=bf16", *layout)[0]
        for layout in ((), ("layout.zero=1",))
    )
    assert one[0][1] == pytest.approx(other[0][1], rel=1e-6)


def test_rounded_parameters_give_gradients_to_their_own():
    network = Branching().float()
    module = loss_module(PlainKit(Branching), network, NARROW, held=False)
    assert isinstance(module, Rounded)
    assert [name for name, _ in module.named_parameters()] == [
        f"module.{name}" for name, _ in network.named_parameters()
    ]
    taken = []
    network.first.register_forward_hook(lambda layer, *_: taken.append(layer.weight.dtype))
    before = [p.clone() for p in network.parameters()]
    total, _ = module((torch.ones(2, 4, dtype=torch.bfloat16), True))
    total.backward()
    assert taken == [torch.bfloat16]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in network.parameters())
    assert all(torch.equal(p, was) for p, was in zip(network.parameters(), before, strict=True))


def test_a_frozen_or_whole_number_parameter_is_left_as_it_is():
    network = Branching().float()
    network.register_parameter("table", torch.nn.Parameter(torch.arange(3), requires_grad=False))
    network.second.requires_grad_(False)
    held = network.table.data_ptr(), network.second.weight.dtype
    loss_module(PlainKit(Branching), network, NARROW, held=False)((torch.ones(2, 4).bfloat16(), True))[
        0
    ].backward()
    assert (network.table.data_ptr(), network.second.weight.dtype) == held
    assert network.table.dtype is torch.int64 and network.second.weight.grad is None


def test_what_leaves_a_network_is_wide_but_a_loss_of_its_own_is_as_it_is():
    linear = torch.nn.Linear(4, 2)
    loss_module(PlainKit(Branching), linear, PrecisionSpec(compute="bf16"), held=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.ones(1, 4)).dtype is torch.float32
        total, _ = squared_error(linear(torch.ones(1, 4)), torch.zeros(1, 2), torch.ones(1, dtype=torch.bool))
    assert total.dtype is torch.float32


def test_who_rounds_parameters():
    for precision, dtype in (
        (PrecisionSpec(), None),
        (PrecisionSpec(compute="bf16"), None),
        (PrecisionSpec(compute="fp32", parameters="compute"), None),
        (NARROW, torch.bfloat16),
    ):
        assert policy(precision).param_dtype is dtype
        assert not policy(precision).cast_forward_inputs
        assert isinstance(
            loss_module(PlainKit(Branching), Branching(), precision, held=False), Rounded
        ) == bool(dtype)
        assert not isinstance(loss_module(PlainKit(Branching), Branching(), precision, held=True), Rounded)
    assert [narrow_dtype(PrecisionSpec(compute=c)) for c in ("fp32", "fp64", "bf16", "fp16")] == [
        None,
        None,
        torch.bfloat16,
        torch.float16,
    ]


@pytest.mark.parametrize("parameters", ["fp32", "compute"])
def test_a_perceptron_in_stages_computes_what_it_does_in_one_piece(ranks, parameters):
    sets = (*("precision.compute=bf16", f"precision.parameters={parameters}"), "batch.micro_batch=2")
    (whole,) = ranks(1).run(pipeline_jobs.losses_of_a_perceptron, *sets)
    _, last = ranks(2).run(pipeline_jobs.losses_of_a_perceptron, *sets, "layout.pp=2")
    assert last == pytest.approx(whole, rel=1e-4)
