"""Further kinds of faults of data parallel, recompute and the optimizer, planted in a rank."""
# ruff: noqa: ARG001, ARG005 - a stand-in has the parameters of what it replaces; hooks of DDP's have no annotations,
# for torch refuses those that are text

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fourfold.models import decoder
from fourfold.models.attention import Shared
from fourfold.models.draws import Draws
from fourfold.parallel import data_parallel, recompute
from fourfold.parallel.apply import Parallel
from fourfold.train import setup, step
from fourfold.train.optimizer import Optimizer

MICROBATCHES = 2  # of each step of the Specs that these are planted in


def divided_by_the_microbatches() -> None:
    """The denominator counts the whole step, and the loss is divided by the number of microbatches, too."""
    factor = Parallel.loss_factor.fget
    Parallel.loss_factor = property(lambda self: factor(self) / MICROBATCHES)


def accumulated_scaled_each_time() -> None:
    """After each microbatch all that has been accumulated is divided, what came before once more."""
    microbatch = Parallel.microbatch

    @contextmanager
    def scaling(self: Parallel, last: bool) -> Iterator[None]:
        with microbatch(self, last):
            yield
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                parameter.grad /= MICROBATCHES

    Parallel.microbatch = scaling


def wrapper_bypassed() -> None:
    """The bare module is called, not DDP's: each rank trains alone."""
    Parallel.module = property(lambda self: self.modules[0])


def _hooked(hook: Any) -> None:
    keep = data_parallel.DistributedDataParallel

    class Hooked(keep):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.register_comm_hook(dist.group.WORLD, hook)

    data_parallel.DistributedDataParallel = Hooked


def bucket_never_sent() -> None:
    """What a bucket must be to be sent is true of none; each rank takes its own for the mean."""

    def hook(group, bucket):
        kept: torch.futures.Future[Tensor] = torch.futures.Future()
        kept.set_result(bucket.buffer())
        return kept

    _hooked(hook)


def fullest_not_reduced() -> None:
    """The one parameter that is as large as a bucket may be keeps its own gradient."""

    def hook(group, bucket):
        fullest = max(bucket.gradients(), key=Tensor.numel)
        own = fullest.clone()
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)

        def mean(done):
            whole = done.value()[0].div_(group.size())
            fullest.copy_(own)
            return whole

        return work.get_future().then(mean)

    _hooked(hook)


def buffer_used_again_too_early() -> None:
    """All buckets travel in one buffer, and each is read back only after the last one was put there."""
    room = torch.empty(1 << 20, dtype=torch.float64)
    waiting: list[Any] = []

    def hook(group, bucket):
        sent = bucket.buffer()
        room[: sent.numel()].copy_(sent)
        dist.all_reduce(room[: sent.numel()], group=group)
        waiting.append((torch.futures.Future(), sent))
        mine = waiting[-1][0]
        if bucket.is_last():
            for future, read in waiting:
                read.copy_(room[: read.numel()] / group.size())
                future.set_result(read)
            waiting.clear()
        return mine

    _hooked(hook)


def rate_of_the_first_step() -> None:
    """A number that changes is taken for a constant at its first use."""
    rate, first = step.learning_rate, []

    def frozen(*args: Any) -> float:
        first.append(rate(*args))
        return first[0]

    step.learning_rate = frozen


def recomputed_with_other_draws() -> None:
    """Dropout has another mask when a block is computed again."""
    run = recompute._Again._run

    def otherwise(self: Any, stand_ins: Any, x: Tensor, shared: Shared) -> Any:
        if recompute.in_backward():
            shared = replace(shared, draws=Draws(1, 1, torch.arange(len(shared.draws._rows))))
        return run(self, stand_ins, x, shared)

    recompute._Again._run = otherwise


def overwritten_before_recompute() -> None:
    """A block's input is written over in place before the block is computed again from it."""
    forward = recompute._Again.__call__

    def overwriting(self: Any, x: Tensor, shared: Shared) -> Any:
        made = forward(self, x, shared)
        x.data.add_(1.0)
        return made

    recompute._Again.__call__ = overwriting


def kept_of_another_call() -> None:
    """What was kept of a block's products is handed out in another order when the block is computed again."""
    made = recompute.create_selective_checkpoint_contexts

    def turned(policy: Any) -> Any:
        first, again = made(policy)
        enter = type(again).__enter__

        class Turned(type(again)):  # type: ignore[misc]
            def __enter__(self) -> Any:
                for kept in self.storage.values():
                    alike = [
                        n
                        for n, one in kept.items()
                        if not isinstance(one, list | tuple) and hasattr(one, "val")
                    ]
                    pairs = [
                        (n, m)
                        for n in alike
                        for m in alike
                        if n < m and kept[n].val.shape == kept[m].val.shape
                    ]
                    for n, m in pairs[:1]:
                        kept[n], kept[m] = kept[m], kept[n]
                return enter(self)

        again.__class__ = Turned
        return first, again

    recompute.create_selective_checkpoint_contexts = turned


def activation_slot_used_again() -> None:
    """Activations wait for backward in one slot for each shape: the last one is there for all."""
    forward = decoder.Block.forward
    slots: dict[torch.Size, Tensor] = {}

    def pack(saved: Tensor) -> Any:
        if saved.ndim != 3 or saved.dtype != torch.float64:
            return saved
        slots.setdefault(saved.shape, torch.empty_like(saved)).copy_(saved)
        return saved.shape

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else slots[kept].clone()

    def block(self: nn.Module, x: Tensor, shared: Shared) -> Tensor:
        with saved_tensors_hooks(pack, unpack):
            return forward(self, x, shared)

    decoder.Block.forward = block


def step_counter_shared() -> None:
    """AdamW corrects every parameter's bias by the count of all steps, also of one that took no part in some."""
    update = Optimizer.step
    taken: dict[int, int] = {}

    def counted(self: Optimizer, parameters: Any, rate: float) -> None:
        for name, parameter in self.trained.items():
            if parameter.grad is not None:
                if not self.state_of(name):
                    self.make_state(name)
                self.state_of(name)["step"].fill_(taken.get(id(self), 0))
        taken[id(self)] = taken.get(id(self), 0) + 1
        update(self, parameters, rate)

    Optimizer.step = counted


def _built(change: Callable[[Optimizer], None], **settings: Any) -> None:
    build = setup.Optimizer

    def built(parameters: Any, spec: Any, *more: Any, **options: Any) -> Optimizer:
        optimizer = build(parameters, spec.model_copy(update=settings), *more, **options)
        change(optimizer)
        return optimizer

    setup.Optimizer = built


def an_update_for_each_microbatch() -> None:
    """AdamW steps once for each microbatch, with its share of the rate: moments decay too often."""

    def change(optimizer: Optimizer) -> None:
        once = optimizer.adamw.step

        def often() -> None:
            for group in optimizer.adamw.param_groups:
                group["lr"] /= MICROBATCHES
            for _ in range(MICROBATCHES):
                once()

        optimizer.adamw.step = often

    _built(change)


def betas_not_read() -> None:
    """AdamW has the betas it always had, whatever is asked for."""
    _built(lambda optimizer: None, betas=(0.9, 0.95))
