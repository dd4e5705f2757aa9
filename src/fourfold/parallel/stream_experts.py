"""Routed experts under tensor parallel: how they take tokens from the stream, and give them back.

  CutExperts   every rank routes all tokens, and has a part of each expert's hidden features: outputs are summed
  CutTokens    every rank routes some tokens, of each row a run, and experts are whole: with expert parallel

Letters: B rows, T tokens of a row, t those of them that this rank routes, H features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from fourfold.models.boxes import box_in
from fourfold.models.exchange import Here
from fourfold.parallel.stream import Cut


def held(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter; where all have all of it, each one's gradient is a part of a sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    parts = [Partial() if place.is_replicate() else place for place in parameter.placements]
    return parameter.to_local(grad_placements=parts)


class CutExperts(Here):
    """Hidden features of every expert are cut. Collectives on "tp": those of a column and of the row after it."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self.speaks = cut.mesh.get_local_rank() == 0

    def enter(self, stream: Tensor) -> Tensor:
        """See `Here.enter`: all tokens."""
        return self._cut.whole(stream).to_local(grad_placements=[Partial()])

    def leave(self, y: Tensor, stream: Tensor) -> Tensor:  # noqa: ARG002
        """See `Here.leave`: summed over ranks."""
        return self._cut.stream(DTensor.from_local(y, self._cut.mesh, [Partial()], run_check=False))

    def own(self, parameter: Tensor) -> Tensor:
        """See `Here.own`."""
        return held(parameter)

    def once(self, parameter: Tensor) -> Tensor:
        """See `Here.once`: one rank adds it."""
        return held(parameter) * int(self.speaks)


class CutTokens(Here):
    """Tokens are cut. Collectives on "tp": without sequence parallel an all-gather of outputs, and of gradients."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut

    def enter(self, stream: Tensor) -> Tensor:
        """See `Here.enter`: this rank's run of each row."""
        whole = stream if isinstance(stream, DTensor) else self._cut.whole(stream)
        return whole.redistribute(self._cut.mesh, [Shard(1)]).to_local()

    def leave(self, y: Tensor, stream: Tensor) -> Tensor:
        """See `Here.leave`."""
        return self._cut.stream(self._parts(y, stream.shape))

    def part(self, of_tokens: Tensor) -> Tensor:
        """See `Here.part`."""
        return of_tokens[box_in(of_tokens.shape, self._cut.mesh, [Shard(1)]).slices]

    @torch.no_grad()
    def together(self, of_part: Tensor, length: int) -> Tensor:
        """See `Here.together`. Collectives: one all-gather over "tp"."""
        rows, _, *rest = of_part.shape
        return self._parts(of_part, torch.Size((rows, length, *rest))).full_tensor()

    def own(self, parameter: Tensor) -> Tensor:
        """See `Here.own`."""
        return held(parameter)

    def once(self, parameter: Tensor) -> Tensor:
        """See `Here.once`: this rank has whole outputs."""
        return held(parameter)

    def _parts(self, y: Tensor, shape: torch.Size) -> DTensor:
        stride = (math.prod(shape[1:]), math.prod(shape[2:]), 1)
        return DTensor.from_local(y, self._cut.mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)
