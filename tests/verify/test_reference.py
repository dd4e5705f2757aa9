from __future__ import annotations

import ast
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn

from fourfold.data.schedule import BatchSchedule
from fourfold.data.source import open_sources
from fourfold.models.protocol import LossModule
from fourfold.models.registry import kit_for
from fourfold.spec.settle import settle
from fourfold.spec.training import OptimizerSpec
from fourfold.train.schedule import learning_rate
from fourfold.verify import reference
from fourfold.verify.measure import relative_gap
from fourfold.verify.reference import (
    TextbookAdamW,
    clipped,
    global_norm,
    joined_rows,
    run_reference,
    whole_batch,
)
from fourfold.verify.uneven import UnevenSource, with_optimizer


def test_it_shares_nothing_of_the_step():
    imported = {
        node.module or ""
        for node in ast.walk(ast.parse(inspect.getsource(reference)))
        if isinstance(node, ast.ImportFrom)
    }
    ours = {name for name in imported if name.startswith(("fourfold.train", "fourfold.parallel"))}
    assert ours == {"fourfold.train.schedule"}


def test_adamw_is_the_one_of_the_paper_by_hand():
    weight = nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
    bias = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    spec = OptimizerSpec(betas=(0.5, 0.75), eps=0.25, weight_decay=0.5)
    optimizer = TextbookAdamW({"weight": weight, "bias": bias}, spec)
    one = {"weight": torch.tensor([[3.0]]).double(), "bias": torch.tensor([3.0]).double()}
    optimizer.step(one, 0.125)
    # m̂ = 3, v̂ = 9 in the first step; decay only on the matrix
    assert bias.item() == pytest.approx(2.0 - 0.125 * 3.0 / 3.25, rel=1e-15)
    assert weight.item() == pytest.approx(2.0 - 0.125 * (3.0 / 3.25 + 0.5 * 2.0), rel=1e-15)
    before = weight.item()
    optimizer.step({"bias": torch.tensor([1.0]).double()}, 0.125)
    assert weight.item() == before, "without a gradient there is no update, and no decay"
    # m = 0.5·1.5 + 0.5·1 = 1.25, m̂ = m / 0.75; v = 0.75·2.25 + 0.25·1 = 1.9375, v̂ = v / 0.4375
    quotient = (1.25 / 0.75) / (math.sqrt(1.9375 / 0.4375) + 0.25)
    assert bias.item() == pytest.approx(2.0 - 0.125 * 3.0 / 3.25 - 0.125 * quotient, rel=1e-15)


def test_norm_and_clipping_by_hand():
    gradients = {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([[4.0]]).double()}
    assert global_norm(gradients) == 5.0
    assert clipped(gradients, 5.0, 2.5)["b"].item() == 2.0
    assert clipped(gradients, 5.0, 5.0) is gradients, "at the bound nothing is scaled"
    assert clipped(gradients, 5.0, 0.0) is gradients, "0 means no clipping"
    assert global_norm({}) == 0.0


@pytest.fixture(scope="module")
def spec(small):
    return settle(small("precision.compute=fp64", "optimizer.clip_norm=0.05", "optimizer.eps=1e-5"), 1)


def test_three_steps_equal_torch_on_the_whole_batch(spec, tmp_path):
    source = UnevenSource(open_sources(spec).train, 3)
    made = run_reference(spec, source, 3, tmp_path)
    kit = kit_for(spec)
    model = kit.build(spec.run.seed, torch.float64)
    module = LossModule(kit, model)
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim >= 2],
            "weight_decay": spec.optimizer.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=spec.optimizer.betas, eps=spec.optimizer.eps)
    schedule = BatchSchedule(len(source), 8, 8, 1, 1, spec.run.seed)
    for step in range(3):
        batch = joined_rows(whole_batch(spec, source, schedule, step))
        assert batch.sample_ids.tolist() == schedule.global_ids(step).tolist()
        assert batch.rows.tolist() == list(range(8))
        loss_sum, count = module(batch)
        (loss_sum / count).backward()
        assert made.steps[step].count == int(count) == int(batch.valid.sum())
        assert made.steps[step].loss == pytest.approx((loss_sum / count).item(), rel=1e-14)
        kept = made.gradients(step)
        for name, parameter in model.named_parameters():
            assert relative_gap(parameter.grad.numpy(), kept[name], made.steps[step].largest_gradient) < 1e-13
        norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])))
        assert made.steps[step].norm == pytest.approx(norm, rel=1e-14)
        assert norm > 0.05, "clipping must act for this test to mean something"
        for parameter in model.parameters():
            parameter.grad.mul_(0.05 / norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec.optimizer, spec.run.steps, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    final = made.parameters()
    for name, parameter in model.named_parameters():
        assert relative_gap(parameter.detach().numpy(), final[name], made.largest_parameter) < 1e-12
    assert made.steps[0].rate == learning_rate(spec.optimizer, spec.run.steps, 0)


def test_chunks_of_rows_change_nothing(spec, tmp_path, monkeypatch):
    source = open_sources(spec).train
    for name, elements in (("one", 1), ("all", 10**6)):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(reference, "CHUNK_ELEMENTS", elements)
        run_reference(spec, source, 1, tmp_path / name)
    one, every = (np.load(tmp_path / name / "gradients-0.npy") for name in ("one", "all"))
    assert relative_gap(one, every, 0.0) < 1e-13
    assert not np.array_equal(one, np.zeros_like(one))


def test_what_takes_no_part_has_no_gradient_and_stays(spec, tmp_path):
    own = spec.model_copy(
        update={
            "model": settle_import("tests.verify.own_model:sometimes"),
            "data": synthetic(),
        }
    )
    made = run_reference(with_optimizer(own, weight_decay=0.5), open_sources(own).train, 2, tmp_path)
    assert made.steps[0].without_gradient == {"never.weight"}
    assert "never.weight" not in made.gradients(1)
    start = kit_for(own).build(own.run.seed, torch.float64).get_parameter("never.weight")
    assert np.array_equal(made.parameters()["never.weight"], start.detach().numpy())


def settle_import(target):
    from fourfold.spec.model import ImportSpec

    return ImportSpec(kind="import", target=target)


def synthetic():
    from fourfold.spec.data import SyntheticDataSpec

    return SyntheticDataSpec(kind="synthetic", samples=40, inputs=4, outputs=1, task="regression")
