"""Classic mistakes of context parallel, planted in a rank by replacing the product's functions by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from fourfold.collectives.context import Context
from fourfold.data.batch import Batch
from fourfold.models.draws import Draws
from fourfold.parallel import context_parallel
from fourfold.parallel.apply import Parallel
from fourfold.parallel.context_parallel import ContextParallel, _Attend, _Gather, _Ulysses
from fourfold.parallel.recompute import in_backward
from fourfold.parallel.ring import Ring


def _changed(change: Any) -> None:
    """What a rank computes of a microbatch, changed."""
    right = ContextParallel.own
    ContextParallel.own = lambda self, batch: change(self, batch, right(self, batch))


def targets_shifted_in_each_part() -> None:
    """Rows are cut first: the last token of each part has the first of the next part here for its target."""

    def shifted(_self: ContextParallel, _whole: Batch, own: Batch) -> Batch:
        return replace(own, targets=torch.cat([own.inputs[:, 1:], own.targets[:, -1:]], 1))

    _changed(shifted)


def targets_shifted_twice() -> None:
    """Targets come shifted, and the loss shifts them again."""

    def shifted(_self: ContextParallel, whole: Batch, own: Batch) -> Batch:
        assert own.context is not None
        return replace(own, targets=own.context.here(whole.targets.roll(-1, 1), 1))

    _changed(shifted)


def targets_cut_in_a_row() -> None:
    """Tokens are cut by head and tail, targets from the first to the last."""

    def straight(self: ContextParallel, whole: Batch, own: Batch) -> Batch:
        length = own.inputs.shape[1]
        targets, valid = (x.narrow(1, self.rank * length, length) for x in (whole.targets, whole.valid))
        return replace(own, targets=targets, valid=valid)

    _changed(straight)


def positions_of_the_part() -> None:
    """Each rank counts the positions of its tokens from 0."""
    right = Context.here

    def local(self: Context, whole: Tensor, dim: int) -> Tensor:
        own = sum(beyond - first for first, beyond in self.runs)
        return whole.narrow(0, 0, own) if dim == 0 else right(self, whole, dim)

    Context.here = local


def masks_by_place_in_the_part() -> None:
    """Who may attend to whom is asked of places in each rank's own part."""
    right = _Attend.__call__

    def local(self: _Attend, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        self.places = [torch.arange(len(places)) for places in self.places]
        return right(self, query, key, value, mask)

    _Attend.__call__ = local


def keys_without_their_gradient() -> None:
    """Keys and values of other ranks are gathered as constants: their gradient stays where they were used."""

    def constant(self: _Gather, query: Tensor, key: Tensor, value: Tensor, masks: Any) -> Tensor:
        parts = []
        for own in (key, value):
            every = functional.all_gather_single(own.detach().contiguous(), 2, self.ring.group)
            by_rank = list(every.chunk(self.ring.ranks, 2))
            by_rank[self.ring.rank] = own
            parts.append(torch.cat(by_rank, 2))
        return context_parallel._attention(query, parts[0], parts[1], masks[0])

    _Gather.attend = constant


def gradients_left_on_the_next_rank() -> None:
    """In the ring's backward the gradients of keys and values are not passed on for the last time."""
    right, passings = Ring.passed, 0

    def passed(self: Ring, held: Tensor) -> Tensor:
        nonlocal passings
        made = right(self, held)
        if not in_backward():
            return made
        passings += 1
        last = (
            passings % (2 * self.ranks - 1) == 0
        )  # keys and gradients n - 1 times, then gradients once more
        return held if last else made

    Ring.passed = passed


def heads_home_in_another_order() -> None:
    """Ulysses' second exchange puts the heads of the ranks beside each other, not one behind the other."""

    def home(self: _Ulysses, x: Tensor) -> Tensor:
        rows, heads, tokens, width = x.shape
        sent = x.reshape(rows, heads, self.ring.ranks, tokens // self.ring.ranks, width).movedim(2, 0)
        return self._exchanged(sent).movedim(0, 2).flatten(1, 2)

    _Ulysses._home = home


def averaged_over_cp_too() -> None:
    """The loss is weighed for as many ranks as share samples; gradients are averaged over those of a row, too."""
    Parallel.loss_factor = property(lambda self: self.degree)


def dropout_by_place_in_the_part() -> None:
    """The mask belongs to a token's place among those that are here."""
    Draws._kept_here = Draws._kept
