"""A part of the loss that is only trained on, not told: it rides on an activation, and its gradient joins in backward.

The loss that is told is a sum over targets, which the trainer multiplies by one factor (1 / count of all targets, the
loss scale, replicas) and takes the gradient of. An auxiliary part is a sum of the same kind, so its gradient has the
same factor. `noted` keeps that factor when backward comes to the loss; `carried` reads it where the auxiliary part was
computed, later in the same backward. So no layout has a factor of its own to get right.

A stage of a pipeline that has no loss has no such backward: there the trainer says the factor (`loss_elsewhere`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.spec.errors import CheckFailed, Problem

_ELSEWHERE: ContextVar[Callable[[], float] | None] = ContextVar(
    "where the loss is on another stage", default=None
)


class LossWeight:
    """What backward multiplies one microbatch's loss with; None before it came there, and it is not said otherwise."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._said = _ELSEWHERE.get()

    def at(self, like: Tensor) -> Tensor:
        """The factor, in the dtype and on the device of `like`. Raises CheckFailed where it is not known."""
        if self.value is None and self._said is not None:
            self.value = torch.full_like(like, self._said())
        if self.value is None:
            raise CheckFailed(_lost())
        return self.value.to(like.dtype)


@contextmanager
def loss_elsewhere(factor: Callable[[], float]) -> Iterator[None]:
    """Around the forward of a part of a model whose loss is on another rank: in its backward it is `factor()`."""
    token = _ELSEWHERE.set(factor)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: LossWeight) -> Tensor:
        ctx.weight = weight
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        ctx.weight.value = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        return gradient, None


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, auxiliary: Tensor, weight: LossWeight, then: Callable[[], None]
    ) -> Tensor:
        ctx.weight, ctx.then, ctx.like = weight, then, torch.empty_like(auxiliary)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = ctx.weight.at(ctx.like)
        ctx.then()
        return gradients[0], factor, None, None


def noted(total: Tensor, weight: LossWeight) -> Tensor:
    """`total`, a loss summed over targets; in backward `weight` has what it is multiplied with."""
    return _Noted.apply(total, weight)  # type: ignore[no-any-return, no-untyped-call]


def carried(x: Tensor, auxiliary: Tensor, weight: LossWeight, then: Callable[[], None]) -> Tensor:
    """`x`, unchanged; in backward the scalar `auxiliary` has the gradient of a part of the loss that `weight` is of.

    then: called once in that backward, and in no other forward of the same microbatch, such as a recomputed one.
    Raises CheckFailed in a backward in which no `noted` loss came before, and none is `loss_elsewhere`.
    """
    return _Carried.apply(x, auxiliary, weight, then)  # type: ignore[no-any-return, no-untyped-call]


def _lost() -> Problem:
    return Problem(
        asked="the gradient of an auxiliary loss that rides on an activation",
        found="a backward that does not come from the loss which it is a part of",
        why="without that loss's factor it would be left out, or be counted by the number of ranks",
        instead="models.carried.noted(total, weight) in the model's loss, with the same weight",
    )
