from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fourfold.spec.errors import CheckFailed, SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.spec.training import PrecisionSpec
from fourfold.train import precision
from fourfold.train.precision import (
    autocast,
    check_loss,
    lacking,
    notes,
    parameter_dtype,
    require_device,
    settle_products,
)
from tests.train import precision_jobs as jobs

CPU = torch.device("cpu")
WIDE = {"torch.float32", "torch.float64"}
TP = ("layout.tp=2", "layout.sp=true")
IN_FP32 = ("mean", "rsqrt", "pow", "_log_softmax", "nll_loss_forward")


@pytest.mark.parametrize("parameters", ["fp32", "compute"])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize(("world", "layout"), [(1, ()), (2, ()), (2, ("layout.zero=3",)), (2, TP)])
def test_what_a_forward_computes_in_is_the_same_on_every_layout(ranks, world, layout, compute, parameters):
    sets = (f"precision.compute={compute}", f"precision.parameters={parameters}")
    narrow = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[compute]
    for seen in ranks(world).run(jobs.dtypes_in_forward, *sets, *layout):
        # Narrow: every matrix product, and what goes into attention.
        assert seen["taken"]["mm"] == [narrow]
        assert narrow in seen["outputs"]["Linear"]
        (attention,) = (
            name for name in seen["taken"] if "flash_attention_for_cpu" in name and "backward" not in name
        )
        assert seen["taken"][attention] == [narrow]
        # Wide: the arithmetic of norms, the softmax of attention (its log-sum-exp) and of the loss, and the loss.
        assert seen["given"][attention] == [narrow, "torch.float32"]
        looked_at = [name for name in IN_FP32 if name in seen["taken"]]
        assert {"rsqrt", "mean", "_log_softmax"} <= set(looked_at)
        for name in looked_at:
            assert set(seen["taken"][name]) <= WIDE, name
        assert seen["outputs"]["Decoder"] == ["torch.float32"]
        assert seen["turns"] == ["torch.complex64"]
        assert seen["loss"] == "torch.float64"
        # The stream between blocks, and with it what norms give, is what parameters are.
        stream = narrow if parameters == "compute" else "torch.float32"
        assert seen["outputs"]["RMSNorm"] == seen["outputs"]["Block"] == [stream]
        # Between steps everything is fp32.
        for what in ("parameters", "gradients", "moments"):
            assert seen[what] == ["torch.float32"], what


def test_fp32_and_fp64_compute_in_one_dtype(ranks):
    for compute, dtype in (("fp32", "torch.float32"), ("fp64", "torch.float64")):
        seen = ranks(1).run(
            jobs.dtypes_in_forward, f"precision.compute={compute}", "precision.parameters=compute"
        )[0]
        assert seen["taken"]["mm"] == [dtype]
        assert seen["outputs"]["Decoder"] == [dtype]
        assert seen["parameters"] == seen["gradients"] == [dtype]


def test_attention_adds_up_its_softmax_in_fp32():
    # 4096 equal scores: in bf16 or fp16 a sum of ones would stop at 256 or 2048.
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4096, 8), torch.ones(1, 1, 4096, 8)
        mixed = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype))
        assert torch.all(mixed == 1)


def test_dtypes_of_parameters_and_of_autocast():
    for compute, held, narrow in (
        ("fp32", torch.float32, None),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
        ("fp64", torch.float64, None),
    ):
        asked = PrecisionSpec(compute=compute)
        assert parameter_dtype(asked) is held
        with autocast(asked, CPU):
            assert torch.is_autocast_enabled("cpu") == (narrow is not None)
            assert narrow is None or torch.get_autocast_dtype("cpu") is narrow


def test_a_device_without_a_dtype_is_refused_with_those_it_has(monkeypatch):
    for compute in ("fp32", "bf16", "fp16", "fp64"):
        require_device(PrecisionSpec(compute=compute), CPU)
    keep = precision._try

    def no_half(dtype, device):
        if dtype is torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nand more")
        keep(dtype, device)

    monkeypatch.setattr(precision, "_try", no_half)
    with pytest.raises(SpecError) as caught:
        require_device(PrecisionSpec(compute="fp16"), CPU)
    (problem,) = caught.value.problems
    assert problem.asked == 'precision.compute = "fp16" on cpu'
    assert problem.found.endswith("not implemented for 'Half'")
    assert problem.instead == "--set precision.compute=bf16 or --set precision.compute=fp32"


@pytest.mark.parametrize(
    ("capability", "has"),
    [((5, 0), {"fp32"}), ((7, 5), {"fp32", "fp16"}), ((9, 0), {"fp32", "fp16", "bf16"})],
)
def test_a_cuda_device_is_asked_for_its_capability(monkeypatch, capability, has):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "An old one")
    device = torch.device("cuda", 0)
    assert {c for c in ("fp32", "fp16", "bf16") if lacking(c, device) is None} == has
    if "bf16" not in has:
        with pytest.raises(SpecError, match=r"An old one of compute capability \d\.\d, below 8\.0"):
            require_device(PrecisionSpec(compute="bf16"), device)


def test_a_precision_that_is_not_there_ends_a_run_before_it_opens_its_data(ranks):
    for told in ranks(2).run(jobs.without_bf16):
        assert "precision.compute=fp32" in told


def test_a_loss_summed_in_a_narrow_dtype_is_refused():
    check_loss(torch.tensor(1.0))
    check_loss(torch.tensor(1.0, dtype=torch.float64))
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(CheckFailed, match="summed in fp32 or wider"):
            check_loss(torch.tensor(1.0, dtype=dtype))


def test_what_a_precision_costs_is_told():
    def told(world, degree, *sets):
        spec = settle(load_spec("tiny", sets).spec, world)
        return " ".join(notes(spec, degree, CPU))

    assert told(2, 2) == told(2, 2, "precision.compute=bf16") == ""
    assert "bf16: half the bytes" in told(2, 2, "precision.reduce=bf16")
    assert told(1, 1, "precision.reduce=bf16") == ""
    sharded = ("layout.zero=3", "precision.compute=bf16")
    assert "precision.parameters=compute" in told(2, 2, *sharded)
    assert told(2, 2, *sharded, "precision.parameters=compute") == ""
    assert "no fp16 arithmetic" in told(1, 1, "precision.compute=fp16")


def test_fp32_products_are_what_the_spec_says_whatever_was_set_before():
    kept = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    try:
        for asked, word in ((True, "tf32"), (False, "ieee")):
            settle_products(PrecisionSpec(tf32=asked))
            assert torch.backends.cuda.matmul.fp32_precision == word
            assert torch.backends.cudnn.conv.fp32_precision == word
    finally:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = kept


def test_tf32_is_refused_where_the_device_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "An old one")
    device = torch.device("cuda", 0)
    for capability, has in (((7, 5), False), ((8, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, there=capability: there)
        if has:
            require_device(PrecisionSpec(tf32=True), device)
        else:
            with pytest.raises(SpecError, match=r"An old one of compute capability 7\.5, below 8\.0"):
                require_device(PrecisionSpec(tf32=True), device)
    require_device(PrecisionSpec(tf32=True), CPU)
