"""What each rank of the memory exercise does: two steps of training, and what it holds in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.parallel.bytes import held
from fourfold.plan.state_bytes import CATEGORIES, Category, Instant
from fourfold.spec.spec import Spec
from fourfold.train import step as train_step
from fourfold.train.setup import Training, open_training
from fourfold.verify.here import joined_here

STEPS = 2  # in the second one everything is there


@dataclass(slots=True)
class Held:
    """What one rank held.

    at: bytes by instant and category. most: by category, the most at the beginning of any block, forward or backward.
    activations: kept by one microbatch's forward for its backward. process: what the process took in all that time,
    beyond the state that is counted, for its allocator, the loader and code that is used for the first time.
    """

    at: dict[Instant, Mapping[Category, int]] = field(default_factory=dict)
    most: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    activations: int = 0
    process: int = 0


def measure(spec: Spec) -> Held:
    """Train two steps of the settled `spec`. Collectives: those of a step."""
    found = Held()
    before = _resident()
    with open_training(spec, joined_here()) as training:

        def look(instant: Instant) -> None:
            found.at[instant] = held(training.parallel, training.optimizer.tensors)

        training.between = lambda: look("between microbatches")
        look("after init")
        for number, batches in enumerate(training.loader.steps(0, STEPS)):
            pending = train_step.agree_totals(training, batches, False)
            with _inside(training, found) if number == STEPS - 1 else _kept(training, found):
                train_step.accumulate(training, batches, pending)
            train_step.clip(training)
            train_step.update(training, number)
        look("after the step")
        found.process = _resident() - before - sum(found.at["after the step"].values())
    return found


@contextmanager
def _inside(training: Training, found: Held) -> Iterator[None]:
    """Looks at the state whenever a block begins, forward or backward."""

    def look(*_: Any) -> None:
        for category, count in held(training.parallel, training.optimizer.tensors).items():
            found.most[category] = max(found.most[category], count)

    handles = []
    for name in training.kit.blocks(training.model):
        block = training.model.get_submodule(name)
        handles += [block.register_forward_pre_hook(look), block.register_full_backward_pre_hook(look)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _kept(training: Training, found: Held) -> Iterator[None]:
    """Adds up what forwards keep for backward, each storage once, without parameters; over the step's microbatches."""
    state: set[int] = set()
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in state:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage  # held, so that its place is not another's
        return tensor

    def watch(*_: Any) -> None:
        state.update(p.untyped_storage()._cdata for p in training.model.parameters())

    handles = [module.register_forward_pre_hook(watch) for module in training.model.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        for handle in handles:
            handle.remove()
    assert training.spec.batch.accumulation, "the Spec is settled"
    found.activations = sum(s.nbytes() for s in kept.values()) // training.spec.batch.accumulation


def _resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
