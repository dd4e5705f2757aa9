"""Rules about layout, optimizer and run. Each function gives the problem, or None (see `rules`)."""

from __future__ import annotations

from fourfold.spec.degrees import nearest_divisors
from fourfold.spec.errors import Problem
from fourfold.spec.model import DecoderSpec
from fourfold.spec.rules_model import decoder_of, either, moe_of
from fourfold.spec.spec import Spec
from fourfold.spec.training import STATE_PARTS

SEED_LIMIT = 2**63  # seeds travel as signed 64-bit integers


def one_auto(spec: Spec) -> Problem | None:
    if spec.layout.dp_replicate != "auto" or spec.layout.dp_shard != "auto":
        return None
    return Problem(
        asked='layout.dp_replicate = "auto" and layout.dp_shard = "auto"',
        found="two degrees to be found from one world size",
        why='"auto" is what the other degrees leave over, so only one can be it',
        instead="--set layout.dp_replicate=1 or --set layout.dp_shard=1",
    )


def zero_shards(spec: Spec) -> Problem | None:
    layout = spec.layout
    if layout.zero or layout.dp_shard in (1, "auto"):
        return None
    return Problem(
        asked=f"layout.dp_shard = {layout.dp_shard} with layout.zero = 0",
        found="ranks to shard over, and nothing to shard",
        why="zero = 0 keeps every tensor whole; zero 1, 2 and 3 shard moments, gradients and parameters in turn",
        instead=f"--set layout.zero=3 or --set layout.dp_shard=1 --set layout.dp_replicate={layout.dp_shard}",
    )


def sp_needs_tp(spec: Spec) -> Problem | None:
    if not spec.layout.sp or spec.layout.tp > 1:
        return None
    return Problem(
        asked="layout.sp = true with layout.tp = 1",
        found="no tensor-parallel ranks to share the sequence among",
        why="sequence parallel is a property of tensor parallel",
        instead="--set layout.sp=false or --set layout.tp=2",
    )


def ep_needs_experts(spec: Spec) -> Problem | None:
    ep, moe = spec.layout.ep, moe_of(spec)
    if ep == 1 or (moe is not None and moe.experts % ep == 0):
        return None
    asked, one = f"layout.ep = {ep}", "--set layout.ep=1"
    if moe is None:
        why = "expert parallel gives every rank other experts"
        return Problem(asked, "a model without experts", why, f"{one} or a model with [model.moe]")
    return Problem(
        asked=f"{asked} with model.moe.experts = {moe.experts}",
        found=f"{moe.experts} / {ep} is no whole number",
        why="every rank of an expert-parallel group holds equally many experts",
        instead=either("layout.ep", nearest_divisors(moe.experts, ep)),
    )


def tp_divides_heads(spec: Spec) -> Problem | None:
    """Whole heads a rank; a key/value head may be copied to several ranks, never cut."""
    model, tp = decoder_of(spec), spec.layout.tp
    if model is None or tp == 1:
        return None
    kv = model.heads if model.mla is not None else model.kv_heads or model.heads
    if model.heads % tp == 0 and (kv % tp == 0 or tp % kv == 0):
        return None
    legal = [
        tp for tp in range(1, model.heads + 1) if model.heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)
    ]
    near = [max(d for d in legal if d <= tp), *[d for d in legal if d > tp][:1]]
    heads = f"model.heads = {model.heads}" + (f" and model.kv_heads = {kv}" if kv != model.heads else "")
    return Problem(
        asked=f"layout.tp = {tp} with {heads}",
        found="heads that would be cut",
        why="tensor parallel gives every rank whole heads: tp divides heads, and kv_heads (or is a multiple of them)",
        instead=either("layout.tp", near),
    )


def pp_has_layers(spec: Spec) -> Problem | None:
    model = spec.model
    if not isinstance(model, DecoderSpec) or spec.layout.pp <= model.layers:
        return None
    return Problem(
        asked=f"layout.pp = {spec.layout.pp} with model.layers = {model.layers}",
        found="more pipeline stages than layers",
        why="every stage holds at least one layer",
        instead=either("layout.pp", [model.layers]),
    )


def schedule_fits(spec: Spec) -> Problem | None:
    optimizer, steps = spec.optimizer, spec.run.steps
    warmup = optimizer.warmup_steps
    if optimizer.decay_steps is not None and optimizer.schedule != "wsd":
        return Problem(
            asked=f'optimizer.decay_steps = {optimizer.decay_steps} with optimizer.schedule = "{optimizer.schedule}"',
            found="a length of a decay that this schedule does not have",
            why="only wsd (warm-up, stable, decay) takes it; it would be silently ignored",
            instead="leave optimizer.decay_steps out or --set optimizer.schedule=wsd",
        )
    decay = optimizer.decay_steps or 0
    # A run that ends inside its warm-up is a short trial, and its plan says so; a decay that begins inside the
    # warm-up is a contradiction.
    if decay == 0 or warmup + decay <= steps:
        return None
    share = steps // 10
    return Problem(
        asked=f"optimizer.warmup_steps = {warmup} and optimizer.decay_steps = {decay} with run.steps = {steps}",
        found=f"{warmup + decay} steps of schedule in {steps} steps",
        why="the decay would begin before the warm-up has ended",
        instead=f"--set optimizer.warmup_steps={share} --set optimizer.decay_steps={share}"
        f" or --set run.steps={warmup + decay} or more",
    )


def betas_below_one(spec: Spec) -> Problem | None:
    betas = spec.optimizer.betas
    if max(betas) < 1.0:
        return None
    return Problem(
        asked=f"optimizer.betas = [{betas[0]}, {betas[1]}]",
        found="a moment that forgets nothing",
        why="AdamW divides by 1 - beta^step, which is 0 for beta = 1",
        instead="--set optimizer.betas=[0.9,0.95]",
    )


def seed_fits(spec: Spec) -> Problem | None:
    if spec.run.seed < SEED_LIMIT:
        return None
    return Problem(
        asked=f"run.seed = {spec.run.seed}",
        found="a number of more than 63 bits",
        why="seeds travel as signed 64-bit integers",
        instead=f"--set run.seed={spec.run.seed % SEED_LIMIT}",
    )


def dir_named(spec: Spec) -> Problem | None:
    if spec.run.dir is None or spec.run.dir.strip():
        return None
    return Problem(
        asked=f'run.dir = "{spec.run.dir}"',
        found="an empty path",
        why="it names no folder",
        instead=f"leave run.dir out for the next free runs/{spec.name}-<n> or --set run.dir=runs/{spec.name}",
    )


def tensors_named(spec: Spec) -> Problem | None:
    """A pattern without its first part would match nothing, or everything, random streams too."""
    for key in ("allow_missing", "allow_surplus"):
        named = getattr(spec.checkpoint, key)
        odd = [name for name in named if not name.startswith(STATE_PARTS) or name in STATE_PARTS]
        if odd:
            full = f"{odd[0]}*" if odd[0] in STATE_PARTS else f"model.{odd[0].lstrip('*.') or '*'}"
            return Problem(
                asked=f"checkpoint.{key} = {[*named]}",
                found=", ".join(map(repr, odd)) + ": no tensor of the model or the optimizer",
                why="tensors of a checkpoint are called model.<name> and optimizer.<name>.<slot>",
                instead=f"--set 'checkpoint.{key}=[\"{full}\"]'",
            )
    return None
