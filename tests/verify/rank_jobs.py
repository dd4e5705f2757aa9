"""What the tests of this room run in ranks."""

from __future__ import annotations

import hashlib
from typing import Any

from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.train import setup, step
from fourfold.verify.deliver import deliver
from fourfold.verify.here import joined_here


def bits_of_steps(spec: Spec) -> str:
    """A digest of everything two steps compute on this rank."""
    digest = hashlib.blake2b()
    with setup.open_training(settle(spec, joined_here().rank.world), joined_here()) as training:
        for number, batches in enumerate(training.loader.steps(0, 2)):
            pair, totals = step.accumulate(training, batches, step.agree_totals(training, batches, False))
            held = {n: p.grad for n, p in training.named_parameters().items()}
            norm = step.clip(training)
            clipped = {n: None if g is None else g.tolist() for n, g in held.items()}
            step.update(training, number)
            values = {n: p.tolist() for n, p in training.named_parameters().items()}
            digest.update(repr((float(pair.sum), totals.count, float(norm), clipped, values)).encode())
    return digest.hexdigest()


def bits_of_reading(spec: Spec, steps: int) -> str:
    """A digest of what this rank reads in `steps` steps and a validation pass."""
    given = deliver(settle(spec, joined_here().rank.world), steps)
    held: list[Any] = [given.ledger.ids.tolist(), given.ledger.valid.tolist(), given.validation.tolist()]
    return hashlib.blake2b(repr(held).encode()).hexdigest()
