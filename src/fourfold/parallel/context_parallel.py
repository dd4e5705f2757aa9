"""Context parallel: each row of tokens is cut between ranks; attention brings them together.

A row is cut into twice as many chunks as there are ranks; each rank takes one from the head and its mirror image from
the tail, so that causal attention costs all ranks the same (Llama 3, arXiv 2407.21783, section 3.3.2). Between the
layers nothing else knows of it. How queries meet the keys and values of other ranks, `layout.cp_method`:

  gather   keys and values of all tokens are gathered on every rank (as in Llama 3): an all-gather in forward, a
           reduce-scatter in backward
  ring     they travel round the ranks, block by block, merged by their log-sum-exp (see `parallel.ring`)
  ulysses  tokens are exchanged for heads: each rank attends with its share of the heads to all tokens (Jacobs et al.,
           arXiv 2309.14509); an all-to-all before and after, in backward too

All on "cp". Letters: B rows, H query heads, K key/value heads, t tokens here, T of all ranks, D features of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fourfold.collectives.context import Context, Mask
from fourfold.data.batch import Batch
from fourfold.parallel.ring import Ring, ring_attention
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.training import CpMethod

Attend = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
Places = Sequence[Tensor]  # of each rank, int64 [t]


class ContextParallel:
    """Rows cut between the ranks of `mesh` ("cp")."""

    def __init__(self, mesh: DeviceMesh, method: CpMethod, apart: bool = False) -> None:
        """apart: attention is called from compiled code, and is no part of it."""
        self._apart = apart
        self._ring = Ring(mesh.get_group())
        self._method = _METHODS[method](self._ring)
        self.rank = self._ring.rank

    def own(self, batch: Batch) -> Batch:
        """This rank's tokens of each row of `batch`, which is whole on every rank of the group.

        The first rank speaks for what its own tokens do not tell: how many of a row are padding. Collectives: none.
        """
        length, mine = batch.inputs.shape[1], self._ring.rank
        runs = [runs_of(length, self._ring.ranks, rank) for rank in range(self._ring.ranks)]
        places = [torch.cat([torch.arange(*run) for run in of_rank]) for of_rank in runs]
        here = _Attend(self._method, places)
        attend: Attend = here
        if self._apart:
            attend = torch.compiler.disable(here.__call__)  # type: ignore[no-untyped-call]
        gather = partial(self._gathered, places)
        own = batch.part(Context(runs[mine], length, attend, gather, batch.inputs, batch.valid))
        return own if mine == 0 else replace(own, processed=0, nonpadding=0)

    @torch.no_grad()
    def _gathered(self, places: Places, here: Tensor) -> Tensor:
        """See `Context.gather`. Collectives: one all-gather over "cp"."""
        by_rank = functional.all_gather_single(here.contiguous(), 1, self._ring.group)
        return torch.empty_like(by_rank).index_copy_(1, torch.cat([*places]).to(here.device), by_rank)

    def check(self) -> None:
        """After a forward: tokens have met those of other ranks, or SpecError: the model does not look at them."""
        if not self._method.met:
            raise SpecError(_blind(self._ring.ranks))


def runs_of(length: int, ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    """The places of a row of `length` tokens that `rank` takes: a chunk of the head and one of the tail."""
    chunk = length // (2 * ranks)
    tail = 2 * ranks - 1 - rank
    return (rank * chunk, (rank + 1) * chunk), (tail * chunk, (tail + 1) * chunk)


@dataclass(slots=True)
class _Attend:
    """Attention of one microbatch; masks are made in the first layer that asks for them, and serve all that do."""

    method: _Method
    places: Places
    _masks: dict[Mask, list[Tensor]] = field(default_factory=dict)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        self.method.met = True
        if mask not in self._masks:
            self._masks[mask] = self.method.masks(self.places, mask)
        return self.method.attend(query, key, value, self._masks[mask])


class _Method(ABC):
    """How queries meet keys and values of other ranks. met: whether they have."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.met = False

    def masks(self, places: Places, mask: Mask) -> list[Tensor]:
        """What `attend` needs: of this rank's tokens against all, as they come together by rank."""
        return [mask(places[self.ring.rank], torch.cat([*places]))]

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """query [B, H, t, D], key and value [B, K, t, D] -> [B, H, t, D]."""


class _Gather(_Method):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor]) -> Tensor:
        both = torch.stack([key, value])
        keys, values = functional.all_gather_single_autograd(both, 3, self.ring.group).unbind(0)
        return _attention(query, keys, values, masks[0])


class _InRing(_Method):
    def masks(self, places: Places, mask: Mask) -> list[Tensor]:
        return [mask(places[self.ring.rank], columns) for columns in places]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor]) -> Tensor:
        return ring_attention(query, key, value, masks, self.ring)


class _Ulysses(_Method):
    def masks(self, places: Places, mask: Mask) -> list[Tensor]:
        every = torch.cat([*places])
        return [mask(every, every)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor]) -> Tensor:
        copies = max(self.ring.ranks // key.shape[1], 1)  # of a key/value head that several ranks need
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        mixed = _attention(self._away(query), self._away(key), self._away(value), masks[0])
        return self._home(mixed)

    def _away(self, x: Tensor) -> Tensor:
        """[B, H, t, D], all heads of some tokens -> [B, H / n, T, D], some heads of all tokens."""
        rows, heads, tokens, width = x.shape
        sent = x.reshape(rows, self.ring.ranks, heads // self.ring.ranks, tokens, width).movedim(1, 0)
        return self._exchanged(sent).movedim(0, 2).flatten(2, 3)

    def _home(self, x: Tensor) -> Tensor:
        """The other way."""
        rows, heads, tokens, width = x.shape
        sent = x.reshape(rows, heads, self.ring.ranks, tokens // self.ring.ranks, width).movedim(2, 0)
        return self._exchanged(sent).movedim(0, 1).flatten(1, 2)

    def _exchanged(self, sent: Tensor) -> Tensor:
        """[n, ...], a part for each rank -> [n, ...], a part of each rank."""
        flat = sent.contiguous().flatten(0, 1)
        made = functional.all_to_all_single_autograd(flat, None, None, self.ring.group)
        return made.view(sent.shape)


_METHODS: dict[CpMethod, Callable[[Ring], _Method]] = {
    "gather": _Gather,
    "ring": _InRing,
    "ulysses": _Ulysses,
}


def _blind(ranks: int) -> Problem:
    return Problem(
        asked=f"layout.cp = {ranks} with this model",
        found="it does not attend by batch.context",
        why="each rank has some tokens of a row: attention among those alone would be another model's",
        instead="batch.context.attend(query, key, value, mask) in its attention (docs/own_model.md), or "
        "--set layout.cp=1",
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)
