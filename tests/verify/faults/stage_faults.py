"""Classic mistakes with stages, planted in a rank by replacing the product's functions by name."""
# ruff: noqa: ARG005 - a stand-in has the parameters of what it replaces

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from fourfold.parallel import pipeline
from fourfold.parallel.clip import GradientNorm
from fourfold.parallel.pipeline import Part, Pipeline
from fourfold.parallel.tied import Tied
from fourfold.spec.schedules import SCHEDULES


def tie_not_summed() -> None:
    """The head's part of a tied parameter's gradient stays in the last stage, the embedding's in the first."""
    Tied.sum = lambda self: None


def divided_by_microbatches() -> None:
    """torch's default: gradients of a sum are divided by the number of microbatches."""

    def scaling(name: str, stages: Sequence[Any], microbatches: int, loss: Any = None) -> Any:
        kind = getattr(pipelining, SCHEDULES[name].torch_class)
        return kind(stages[0], microbatches, loss_fn=loss)

    pipeline.new_schedule = scaling
    pipeline._Stage.perform_reduce_grad = PipelineStage.perform_reduce_grad


def norm_of_own_stages() -> None:
    """Each rank clips by the norm of its own stages."""
    whole = GradientNorm.__call__

    def own(self: Any, parameters: Any, device: torch.device) -> Tensor:
        self._staged = False
        return whole(self, parameters, device)

    GradientNorm.__call__ = own


def documents_of_the_first_microbatch() -> None:
    """Every stage but the first takes masks and draws of the step's first microbatch for those of all."""
    right = Pipeline.computed

    def wrong(self: Pipeline, part: Part, micro: int, stream: Tensor | None) -> Tensor:
        if stream is None:
            return right(self, part, micro, stream)
        kept = self._step.batches
        self._step.batches = [kept[0]] * len(kept)
        try:
            return right(self, part, micro, stream)
        finally:
            self._step.batches = kept

    Pipeline.computed = wrong


def gradients_cleared_in_mid_step() -> None:
    """A stage that is made ready anew for a microbatch drops what was added up before it."""
    right = Pipeline.computed

    def wrong(self: Pipeline, part: Part, micro: int, stream: Tensor | None) -> Tensor:
        if micro == len(self._step.batches) - 1:
            for parameter in part.module.parameters():
                parameter.grad = None
        return right(self, part, micro, stream)

    Pipeline.computed = wrong
