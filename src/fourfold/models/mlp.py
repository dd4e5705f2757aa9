"""The multilayer perceptron: regression or classification of vectors.

Letters: B rows, F features.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.models.draws import Draws
from fourfold.models.initial import Linear, fill
from fourfold.models.loss import cross_entropy, squared_error
from fourfold.models.protocol import BatchLike, Rule, Start
from fourfold.spec.model import MlpSpec


class Mlp(nn.Module):
    """Linear and ReLU `layers` times, then a Linear."""

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__()
        self.dropout = spec.dropout
        widths = [spec.inputs, *[spec.hidden] * spec.layers]
        self.layers = nn.ModuleList(
            Linear(before, after, bias=spec.biases) for before, after in pairwise(widths)
        )
        self.output = Linear(spec.hidden, spec.outputs, bias=spec.biases)

    def forward(self, features: Tensor, draws: Draws | None = None) -> Tensor:
        """float [B, inputs] -> [B, outputs]; dropout after each hidden layer where `draws` are given.

        A stage of a pipeline has None in the place of layers that it lacks: it takes and gives [B, hidden].
        """
        x = features
        for index, layer in enumerate(self.layers):
            if layer is None:
                continue
            x = F.relu(layer(x))
            if draws is not None:
                x = draws.dropout(x, self.dropout, f"layers.{index}")
        outputs: Tensor = x if self.output is None else self.output(x)
        return outputs


class MlpKit:
    """The perceptron as a `ModelKit`."""

    def __init__(self, spec: MlpSpec) -> None:
        self._spec = spec

    def build(self, seed: int, dtype: torch.dtype) -> Mlp:
        """See `ModelKit.build`."""
        module = Mlp(self._spec)
        fill(module, self.start, seed, dtype)
        return module

    def skeleton(self, dtype: torch.dtype) -> Mlp:
        """See `BoxedKit.skeleton`."""
        with torch.device("meta"):
            return Mlp(self._spec).to(dtype)

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        """See `ModelKit.loss`; features are taken in the parameters' dtype."""
        return self._measured(self._forward(module, batch, None), batch)

    def part(
        self, module: nn.Module, batch: BatchLike, stream: Tensor | None, last: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `StagedKit.part`; between stages in the parameters' dtype, though in bf16 a layer gives bf16."""
        given = self._forward(module, batch, stream)
        return self._measured(given, batch) if last else given.to(next(module.parameters()).dtype)

    def _forward(self, module: nn.Module, batch: BatchLike, stream: Tensor | None) -> Tensor:
        dropping = module.training and self._spec.dropout > 0
        draws = Draws(batch.seed, batch.step, batch.rows) if dropping else None
        features = batch.inputs.to(next(module.parameters()).dtype) if stream is None else stream
        given: Tensor = module(features, draws)
        return given

    def _measured(self, outputs: Tensor, batch: BatchLike) -> tuple[Tensor, Tensor]:
        measure = squared_error if self._spec.task == "regression" else cross_entropy
        return measure(outputs, batch.targets, batch.valid)

    def ends(self, module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:  # noqa: ARG002
        """See `StagedKit.ends`."""
        return (), ("output",)

    def stream(self, batch: BatchLike) -> tuple[int, ...]:
        """See `StagedKit.stream`."""
        return (len(batch.rows), self._spec.hidden)

    def sharding(self) -> dict[str, Rule]:
        """See `ModelKit.sharding`."""
        cut = self._spec.layers % 2 == 1  # the last hidden layer comes cut
        table: dict[str, Rule] = {"output.weight": "row" if cut else "replicate"}
        for index in range(self._spec.layers):
            table[f"layers.{index}.weight"] = "column" if index % 2 == 0 else "row"
        if self._spec.biases:
            for index in range(self._spec.layers):
                table[f"layers.{index}.bias"] = "column" if index % 2 == 0 else "replicate"
            table["output.bias"] = "replicate"
        return table

    def blocks(self, module: nn.Module) -> tuple[str, ...]:
        """See `ModelKit.blocks`."""
        return tuple(name for name, _ in module.named_modules() if name.startswith("layers."))

    def start(self, name: str) -> Start:
        """See `BoxedKit.start`. Variance 2 / inputs before a ReLU (He et al., arXiv 1502.01852), else 1 / inputs."""
        if name.endswith("bias"):
            return Start(0.0, 0.0)
        if name == "output.weight":
            return Start(0.0, math.sqrt(1 / self._spec.hidden))
        inputs = self._spec.inputs if name.startswith("layers.0.") else self._spec.hidden
        return Start(0.0, math.sqrt(2 / inputs))
