"""Rules about optimizer, run and checkpoints. Each function gives the problem, or None (see `rules`)."""

from __future__ import annotations

from fourfold.spec.errors import Problem
from fourfold.spec.spec import Spec
from fourfold.spec.training import STATE_PARTS
from fourfold.spec.words import counted

SEED_LIMIT = 2**63  # seeds travel as signed 64-bit integers


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
        found=f"{counted(warmup + decay, 'step')} of schedule in {counted(steps, 'step')}",
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
