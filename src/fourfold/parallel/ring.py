"""Attention over keys and values that travel round a ring of ranks, merged by their log-sum-exp.

Source: Liu et al., arXiv 2310.01889; the merging of blocks is that of Milakov & Gimelshein, arXiv 1805.02867, the
backward that of Dao et al., arXiv 2205.14135, algorithm 4: probabilities are computed again, block by block, from the
log-sum-exp, so that no more than one block of scores is held at a time.
Letters: B rows, H query heads, K key/value heads, t tokens here, D features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ring:
    """The ranks of a group in a ring; each sends to the next, and has from the one before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = group.size()
        self.rank = group.rank()
        members = dist.get_process_group_ranks(group)
        self._next = members[(self.rank + 1) % self.ranks]
        self._before = members[(self.rank - 1) % self.ranks]

    def passed(self, held: Tensor) -> Tensor:
        """What the rank before has held. Collectives: one send and one receipt."""
        held = held.contiguous()
        received = torch.empty_like(held)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, held, self._next, self.group),
                dist.P2POp(dist.irecv, received, self._before, self.group),
            ]
        ):
            work.wait()
        return received


def ring_attention(query: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor], ring: Ring) -> Tensor:
    """query [B, H, t, D], key and value [B, K, t, D] -> [B, H, t, D].

    masks  for each rank of the ring what is added to the scores of this rank's queries against its keys: [B, 1, t, t];
           no row of this rank's own is empty
    Collectives: in forward n - 1 passings on of key and value, in backward those again and n of their gradients.
    """
    return _RingAttention.apply(query, key, value, ring, *masks)  # type: ignore[no-any-return, no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, *masks: Tensor) -> Tensor:
        grouped = _grouped(query, key)
        held = torch.stack([key, value])
        top = grouped.new_full((*grouped.shape[:-1], 1), -math.inf, dtype=_wide(query))
        total = torch.zeros_like(top)
        mixed = torch.zeros_like(grouped, dtype=top.dtype)
        for step in range(ring.ranks):
            if step:
                held = ring.passed(held)
            scores = _scores(grouped, held[0], masks[(ring.rank - step) % ring.ranks])
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = (scores - higher).exp_()
            shrink = (top - higher).exp_()
            total = total * shrink + weights.sum(-1, keepdim=True)
            mixed = mixed * shrink + weights @ held[1].unsqueeze(2).to(weights.dtype)
            top = higher
        mixed /= total
        ctx.save_for_backward(query, key, value, mixed, top + total.log(), *masks)
        ctx.ring = ring
        return mixed.flatten(1, 2).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, log_total, *masks = ctx.saved_tensors
        ring: Ring = ctx.ring
        wide = mixed.dtype
        grouped = _grouped(query, key)
        gradient = _grouped(gradients[0], key).to(wide)
        share = (gradient * mixed).sum(
            -1, keepdim=True
        )  # of the softmax's backward, the same for every block
        scale = query.shape[-1] ** -0.5
        query_gradient = torch.zeros_like(grouped, dtype=wide)
        held = torch.stack([key, value])
        travelling = torch.zeros_like(held, dtype=wide)  # their gradients, which come home after a whole turn
        for step in range(ring.ranks):
            if step:
                held, travelling = ring.passed(held), ring.passed(travelling)
            weights = _scores(grouped, held[0], masks[(ring.rank - step) % ring.ranks]).sub_(log_total).exp_()
            of_weights = gradient @ held[1].unsqueeze(2).to(wide).transpose(-1, -2)
            of_scores = weights * (of_weights - share) * scale
            query_gradient += of_scores @ held[0].unsqueeze(2).to(wide)
            travelling[0] += (of_scores.transpose(-1, -2) @ grouped.to(wide)).sum(2)
            travelling[1] += (weights.transpose(-1, -2) @ gradient).sum(2)
        if ring.ranks > 1:
            travelling = ring.passed(travelling)
        of_key, of_value = travelling.to(key.dtype).unbind(0)
        return (query_gradient.flatten(1, 2).to(query.dtype), of_key, of_value, None, *(None for _ in masks))


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """[B, H, t, D] -> [B, K, H / K, t, D]: the query heads that share a key/value head, beside each other."""
    rows, heads, tokens, width = query.shape
    return query.view(rows, key.shape[1], heads // key.shape[1], tokens, width)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scores(grouped: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """[B, K, H / K, t, t], in fp32 or wider."""
    wide = _wide(grouped)
    scale = grouped.shape[-1] ** -0.5
    scores: Tensor = (grouped.to(wide) * scale) @ key.unsqueeze(2).to(wide).transpose(-1, -2)
    return scores.add_(mask.unsqueeze(2).to(wide))
