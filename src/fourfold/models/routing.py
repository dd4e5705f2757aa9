"""Which experts a token goes to, how many an expert takes, and how evenly: plain functions of one row's tokens.

Live tokens are those from which some loss follows: of a row all up to the last that has a valid target. Padding, rows
that only fill a batch and what comes after the last target reach no loss through causal attention; they go to no
expert, and count for neither balance nor capacity.
Letters: B rows, t tokens here, T all tokens of a row, E experts, K of them for a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.collectives.context import Context
from fourfold.models.carried import LossWeight
from fourfold.models.protocol import BatchLike
from fourfold.spec.model import MoeSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one microbatch. live: bool [B, T]; targets: valid ones of each whole row, int64 [B].

    context: which tokens are here; None: all. weight: of the loss.
    """

    live: Tensor
    targets: Tensor
    context: Context | None
    weight: LossWeight

    @classmethod
    def of(cls, batch: BatchLike) -> Rows:
        """Those of `batch`."""
        valid = batch.valid if batch.context is None else batch.context.valid.to(batch.valid.device)
        live = valid.flip(1).cumsum(1).flip(1) > 0
        return cls(live, valid.sum(1), batch.context, LossWeight())

    @property
    def live_here(self) -> Tensor:
        """Bool [B, t]."""
        return self.here(self.live)

    def here(self, whole: Tensor) -> Tensor:
        """[B, T, ...] -> [B, t, ...]."""
        return whole if self.context is None else self.context.here(whole, 1)

    def whole(self, here: Tensor) -> Tensor:
        """The other way, without a gradient. Collectives: under context parallel one all-gather over "cp"."""
        return here if self.context is None else self.context.gather(here)


def chosen_experts(logits: Tensor, moe: MoeSpec, correction: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B, t, E] of `logits`, the K experts of each token and their weights [B, t, K].

    Chosen are the highest scores, each with its `correction` (arXiv 2412.19437, equation 16); of equal ones the first.
    Weights are the scores without it, over their sum (arXiv 2401.04088, section 2.1; 2412.19437, equation 13); of a
    single expert the score itself, or no gradient would reach the router (arXiv 2101.03961, equation 2).
    """
    scores = logits.softmax(-1) if moe.router == "softmax" else logits.sigmoid()
    ranked = scores.detach() if correction is None else scores.detach() + correction
    chosen = torch.sort(ranked, stable=True, dim=-1, descending=True).indices[..., : moe.top_k]
    weights = scores.gather(-1, chosen)
    if moe.top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(weights.dtype).tiny)
    return scores, chosen, weights


def counted(chosen: Tensor, live: Tensor | None, experts: int) -> Tensor:
    """How many of the choices [B, n, K] of live tokens (bool [B, n]; None: all) fell on each expert: int64 [B, E].

    A choice of the number `experts` is none.
    """
    if live is not None:
        chosen = chosen.masked_fill(~live.unsqueeze(-1), experts)
    flat = chosen.flatten(1)
    counts = flat.new_zeros(len(flat), experts + 1)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))[:, :experts]


def capacities(tokens: Tensor, moe: MoeSpec) -> Tensor:
    """How many tokens of a row of so many live ones an expert takes: int64 [B] -> int64 [B].

    The factor times an equal share of their choices (arXiv 2101.03961, equation 3), rounded up.
    """
    assert moe.capacity_factor is not None, "there is no limit"
    return (tokens.double() * (moe.capacity_factor * moe.top_k / moe.experts)).ceil().long()


def fitting(chosen: Tensor, live: Tensor, limits: Tensor, experts: int) -> Tensor:
    """Which choices [B, T, K] of whole rows their experts take, with room for `limits` [B] each: bool [B, T, K].

    First choices come before second ones, and among these earlier tokens before later ones (Lepikhin et al., arXiv
    2006.16668, algorithm 1).
    """
    rows, tokens, each = chosen.shape
    flat = chosen.masked_fill(~live.unsqueeze(-1), experts).transpose(1, 2).reshape(rows, -1)
    counts = flat.new_zeros(rows, experts + 1).scatter_add_(1, flat, torch.ones_like(flat))
    sorted_, order = flat.sort(stable=True)
    before = (counts.cumsum(1) - counts).gather(1, sorted_)
    place = torch.arange(flat.shape[1], device=flat.device) - before
    taken = torch.empty_like(flat).scatter_(1, order, place) < limits[:, None]
    return taken.view(rows, each, tokens).transpose(1, 2) & live.unsqueeze(-1)


def auxiliary(scores: Tensor, live: Tensor, counts: Tensor, rows: Rows, moe: MoeSpec) -> Tensor:
    """The part of this rank's tokens in the auxiliary loss of one layer, as a sum like the loss itself: 0-dim.

    Of a row with T live tokens it is sum over experts i of f_i P_i, with

        f_i = E / (K T) × how many of its tokens chose i      P_i = 1 / T × sum over its tokens of i's normalised score

    (Switch, arXiv 2101.03961, equations 4 to 6; over one row, and K choices: DeepSeek-V3, arXiv 2412.19437, equations
    17 to 20), which is 1 where all experts are chosen, and scored, alike. It counts as often as the row has valid
    targets: divided by the number of all valid targets, as the loss is, it is their mean over targets. f is not
    differentiated, and P is a sum over tokens, so that a rank needs nothing but `counts` of the others.

    scores: float [B, t, E]; live: bool [B, t]; counts: int64 [B, E], of choices in whole rows
    """
    shares = scores if moe.router == "softmax" else scores / scores.sum(-1, keepdim=True)
    length = rows.live.sum(1).clamp(min=1).to(scores.dtype)
    often = counts.to(scores.dtype) * (moe.experts / moe.top_k) / length[:, None]
    factor = often * (rows.targets.to(scores.dtype) / length)[:, None]
    return (factor[:, None] * shares * live.unsqueeze(-1)).sum()
