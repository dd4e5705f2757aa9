"""The learning rate of a step: a pure function, so that a resumed or re-cut run has the same one."""

from __future__ import annotations

import math

from fourfold.spec.training import OptimizerSpec


def learning_rate(optimizer: OptimizerSpec, total_steps: int, step: int) -> float:
    """Learning rate of `step` (from 0) in a run of `total_steps`.

    Warm-up is linear and reaches `lr` in step `warmup_steps - 1`. After it: constant; linear or cosine
    (Loshchilov & Hutter, arXiv 1608.03983, eq. 5, one period) down to `final_lr_share × lr` in the last step;
    or warm-up-stable-decay (Hu et al., arXiv 2404.06395, section 4): constant, then linear over the last
    `decay_steps`.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    start = warmup
    if optimizer.schedule == "wsd":
        decay = optimizer.decay_steps if optimizer.decay_steps is not None else max(1, total_steps // 10)
        start = max(warmup, total_steps - decay - 1)
    # The last step of the run is the first to have the final rate.
    span = max(1, total_steps - 1 - start)
    progress = min(1.0, max(0.0, (step - start) / span))
    if optimizer.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = 1.0 - progress
    final = optimizer.final_lr_share
    return optimizer.lr * (final + (1.0 - final) * share)
