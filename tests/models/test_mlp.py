"""The perceptron: regression and classification."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fourfold.data.batch import Batch
from fourfold.models.draws import Draws
from fourfold.models.mlp import MlpKit
from fourfold.models.protocol import parameter_rules
from fourfold.plan.parameters import count_parameters
from fourfold.spec.model import MlpSpec

Make = Callable[..., Batch]
REGRESSION = MlpSpec(kind="mlp", inputs=6, hidden=16, layers=2, outputs=3)
CLASSES = MlpSpec(kind="mlp", inputs=6, hidden=16, layers=1, outputs=5, task="classification", biases=False)
both = pytest.mark.parametrize("spec", [REGRESSION, CLASSES], ids=["regression", "classification"])


def batch_for(spec: MlpSpec, vectors: Make, rows: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(1)
    if spec.task == "regression":
        targets = torch.randn(rows, spec.outputs, generator=generator, dtype=torch.float64)
    else:
        targets = torch.randint(spec.outputs, (rows,), generator=generator)
    return vectors(rows, spec.inputs, targets)


def test_regression_is_squared_error_meant_over_outputs(vectors: Make) -> None:
    batch = batch_for(REGRESSION, vectors)
    batch = replace(batch, valid=torch.arange(8) < 5)
    kit = MlpKit(REGRESSION)
    module = kit.build(0, torch.float64)
    total, count = kit.loss(module, batch)
    expected = torch.nn.functional.mse_loss(module(batch.inputs[:5]), batch.targets[:5]) * 5
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    assert count == 5


def test_classification_is_cross_entropy(vectors: Make) -> None:
    batch = batch_for(CLASSES, vectors)
    batch = replace(batch, valid=torch.arange(8) < 5)
    kit = MlpKit(CLASSES)
    module = kit.build(0, torch.float64)
    total, count = kit.loss(module, batch)
    expected = torch.nn.functional.cross_entropy(module(batch.inputs[:5]), batch.targets[:5]) * 5
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
    assert count == 5


def test_each_layer_drops_by_its_own_name() -> None:
    names = []

    class Noted(Draws):
        def dropout(self, x: torch.Tensor, p: float, name: str) -> torch.Tensor:
            names.append((name, p))
            return super().dropout(x, p, name)

    module = MlpKit(REGRESSION.model_copy(update={"dropout": 0.3})).build(0, torch.float64)
    module(torch.ones(4, 6, dtype=torch.float64), Noted(0, 0, torch.arange(4)))
    assert names == [("layers.0", 0.3), ("layers.1", 0.3)]


@both
def test_rows_in_any_split_sum_to_the_same(
    spec: MlpSpec, vectors: Make, rows_of: Callable[..., Batch]
) -> None:
    spec = spec.model_copy(update={"dropout": 0.3})
    batch, kit = batch_for(spec, vectors), MlpKit(spec)
    module = kit.build(0, torch.float64)
    whole, _ = kit.loss(module, batch)
    parts = [kit.loss(module, rows_of(batch, rows))[0] for rows in ([7, 1], [0, 2, 4], [3, 6, 5])]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-13, atol=0)
    module.eval()
    assert kit.loss(module, batch)[0] != whole


@both
def test_no_valid_target_gives_zero_and_zero_gradients(spec: MlpSpec, vectors: Make) -> None:
    batch, kit = batch_for(spec, vectors), MlpKit(spec)
    batch = replace(batch, valid=torch.zeros(8, dtype=torch.bool))
    module = kit.build(0, torch.float32)
    total, count = kit.loss(module, batch.to(torch.device("cpu"), torch.float32))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


@both
@pytest.mark.parametrize("biases", [True, False])
def test_the_plan_counts_its_parameters_and_each_has_one_rule(spec: MlpSpec, biases: bool) -> None:
    spec = spec.model_copy(update={"biases": biases})
    kit = MlpKit(spec)
    module = kit.build(0, torch.float32)
    assert sum(p.numel() for p in module.parameters()) == count_parameters(spec)
    assert parameter_rules(kit, module).keys() == dict(module.named_parameters()).keys()
    assert kit.blocks(module) == tuple(f"layers.{i}" for i in range(spec.layers))


def test_initial_values_keep_the_signals_size() -> None:
    kit = MlpKit(MlpSpec(kind="mlp", inputs=64, hidden=256, layers=3, outputs=1))
    exact = dict(kit.build(3, torch.float64).named_parameters())
    for name, value in kit.build(3, torch.float32).named_parameters():
        assert torch.equal(value, exact[name].float())
        if name.endswith("bias"):
            assert not value.any()
    assert exact["layers.0.weight"].std().item() == pytest.approx(math.sqrt(2 / 64), rel=0.05)
    assert exact["layers.2.weight"].std().item() == pytest.approx(math.sqrt(2 / 256), rel=0.05)
    assert exact["output.weight"].std().item() == pytest.approx(math.sqrt(1 / 256), rel=0.3)


@both
def test_features_are_taken_in_the_parameters_dtype(spec: MlpSpec, vectors: Make) -> None:
    kit, batch = MlpKit(spec), batch_for(spec, vectors)
    for dtype in (torch.float32, torch.float64):
        total, _ = kit.loss(kit.build(0, dtype), batch)
        assert total.isfinite()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = kit.loss(kit.build(0, torch.float32), batch.to(torch.device("cpu"), torch.float32))
    assert total.dtype == torch.float32


def test_too_few_features_are_refused_by_torch(vectors: Make) -> None:
    kit = MlpKit(REGRESSION)
    batch = vectors(2, REGRESSION.inputs - 1, torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        kit.loss(kit.build(0, torch.float32), batch)
