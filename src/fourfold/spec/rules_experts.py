"""Rules about `[model.moe]` and what cuts experts. Each function gives the problem, or None (see `rules`)."""

from __future__ import annotations

import math

from fourfold.spec.degrees import divisors, nearest_divisors
from fourfold.spec.errors import Problem
from fourfold.spec.model import MoeSpec
from fourfold.spec.rules_model import decoder_of, either, moe_of, multiples_near
from fourfold.spec.spec import Spec
from fourfold.spec.widths import expert_width
from fourfold.spec.words import counted


def moe_counts(spec: Spec) -> Problem | None:
    model, moe = decoder_of(spec), moe_of(spec)
    if model is None or moe is None:
        return None
    if moe.top_k > moe.experts:
        return Problem(
            asked=f"model.moe.top_k = {moe.top_k} with model.moe.experts = {moe.experts}",
            found="more experts for a token than there are",
            why="a token goes to top_k different experts",
            instead=f"--set model.moe.top_k={moe.experts}",
        )
    if moe.first_dense_layers >= model.layers:
        return Problem(
            asked=f"model.moe.first_dense_layers = {moe.first_dense_layers} with model.layers = {model.layers}",
            found="no layer left for the experts",
            why="[model.moe] would be silently ignored",
            instead=f"--set model.moe.first_dense_layers={model.layers - 1} or no [model.moe]",
        )
    return None


def balance_is_used(spec: Spec) -> Problem | None:
    """A weight is of the loss, a speed of the correction."""
    moe = moe_of(spec)
    if moe is None:
        return None
    for key, of in (("balance_weight", "loss"), ("balance_speed", "bias")):
        value = getattr(moe, key)
        if value is not None and moe.balance != of:
            return Problem(
                asked=f'model.moe.{key} = {value:g} with model.moe.balance = "{moe.balance}"',
                found=f'a setting of model.moe.balance = "{of}"',
                why="it would be silently ignored",
                instead=f"--set model.moe.balance={of} or no model.moe.{key}",
            )
    return None


def capacity_takes_tokens(spec: Spec) -> Problem | None:
    """An expert that takes less than one token of a whole row: nearly all are dropped, and none in turn."""
    moe, sequence = moe_of(spec), getattr(spec.data, "sequence", None)
    if moe is None or moe.capacity_factor is None or sequence is None:
        return None
    each = moe.capacity_factor * moe.top_k * sequence / moe.experts
    if each >= 1:
        return None
    least = math.ceil(1000 * moe.experts / (moe.top_k * sequence)) / 1000
    return Problem(
        asked=f"model.moe.capacity_factor = {moe.capacity_factor:g} with {counted(moe.experts, 'expert')}, "
        f"top_k = {moe.top_k} and data.sequence = {sequence}",
        found=f"room for {each:.2g} of a row's tokens in each expert",
        why="a row's other tokens are dropped: hardly any would ever reach an expert",
        instead=f"--set model.moe.capacity_factor={max(least, 1.0):g} or no model.moe.capacity_factor "
        f"(at least {least:g})",
    )


def ep_needs_experts(spec: Spec) -> Problem | None:
    ep, moe = spec.layout.ep, moe_of(spec)
    if ep == 1 or (moe is not None and moe.experts % ep == 0) or spec.model.kind in ("import", "huggingface"):
        return None
    asked, one = f"layout.ep = {ep}", "--set layout.ep=1"
    if moe is None:
        why = "expert parallel gives every rank other experts"
        return Problem(asked, "a model without experts", why, f"{one} or a model with [model.moe]")
    return Problem(
        asked=f"{asked} with model.moe.experts = {moe.experts}",
        found=f"{counted(moe.experts, 'expert')}, which make no such number of equal groups",
        why="every rank of an expert-parallel group holds equally many experts",
        instead=either("layout.ep", nearest_divisors(moe.experts, ep)),
    )


def tp_divides_experts(spec: Spec) -> Problem | None:
    """Under expert parallel each rank has whole experts; only the shared ones are cut."""
    model, moe, layout = decoder_of(spec), moe_of(spec), spec.layout
    if model is None or moe is None or _cuts_experts(expert_width(model), moe, layout.tp, layout.ep):
        return None
    width = expert_width(model)
    legal = [tp for tp in divisors(math.gcd(model.heads, width)) if tp == 1 or tp != layout.tp]
    near = [max(tp for tp in legal if tp <= layout.tp), *[tp for tp in legal if tp > layout.tp][:1]]
    return Problem(
        asked=f"layout.tp = {layout.tp} with model.moe.expert_width = {width}",
        found=f"{counted(width, 'hidden feature')} of an expert, which make no such number of equal parts",
        why="tensor parallel gives every rank equally many hidden features of each expert"
        if layout.ep == 1
        else "tensor parallel gives every rank equally many hidden features of the shared experts",
        instead=f"{either('layout.tp', near)} or {either('model.moe.expert_width', multiples_near(width, layout.tp))}",
    )


def _cuts_experts(width: int, moe: MoeSpec, tp: int, ep: int) -> bool:
    routed = ep > 1 or width % tp == 0
    return routed and (moe.shared_experts * width) % tp == 0
