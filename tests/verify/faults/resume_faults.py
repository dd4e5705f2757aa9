"""Classic mistakes of checkpoints and resumed runs, planted in a rank by replacing the product's functions by name."""
# ruff: noqa: ARG005 - a stand-in has the parameters of what it replaces

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.data.loader import Loader
from fourfold.record.rewind import Marker
from fourfold.train import loop, saving, step
from fourfold.train.setup import Training


def _not_loaded(chosen: Callable[[str], bool], zero: bool = False) -> None:
    """What a load gives these tensors is lost: they keep their values, or are zero."""
    load = saving.load

    def losing(folder: Path, tensors: dict[str, torch.Tensor], **more: Any) -> Any:
        before = {name: tensor.clone() for name, tensor in tensors.items() if chosen(name)}
        assert before, "there is nothing to lose"
        state = load(folder, tensors, **more)
        for name, value in before.items():
            tensors[name].copy_(torch.zeros_like(value) if zero else value)
        return state

    saving.load = losing


def moments_not_restored() -> None:
    """AdamW begins with moments of zero again."""
    _not_loaded(lambda name: name.endswith((".exp_avg", ".exp_avg_sq")), zero=True)


def step_counter_reset() -> None:
    """AdamW counts its steps from the resume on, and corrects a bias that is not there."""
    _not_loaded(lambda name: name.startswith("optimizer.") and name.endswith(".step"), zero=True)


def a_parameter_not_loaded() -> None:
    """One bias keeps its initial value on rank 0 alone."""
    if dist.get_rank() == 0:
        _not_loaded(lambda name: name.startswith("model.") and name.endswith(".bias"))


def running_mean_not_loaded() -> None:
    """A buffer keeps its initial value."""
    _not_loaded(lambda name: name.endswith("running_mean"))


def batches_not_counted_on() -> None:
    """A buffer that changes no loss is not loaded."""
    _not_loaded(lambda name: name.endswith("num_batches_tracked"))


def streams_of_rank_0() -> None:
    """Every rank restores rank 0's random streams, as if they were replicas."""
    restore = saving.restore_streams

    def restored(rank: int, tensors: dict[str, torch.Tensor]) -> None:
        own = {n.partition(".")[2]: value for n, value in tensors.items() if n.startswith(f"rank{rank}.")}
        held: list[Any] = [own]
        dist.broadcast_object_list(held, 0)
        restore(rank, {f"rank{rank}.{name}": value for name, value in held[0].items()})

    saving.restore_streams = restored


def streams_not_restored() -> None:
    """The random streams stay as a new run has them."""
    saving.restore_streams = lambda rank, tensors: None


def _reading(order: Callable[[Loader, int, int], Iterator[int]]) -> None:
    """A resumed run reads the steps that order(loader, start, stop) tells, as if they were start to stop - 1."""
    steps = Loader.steps

    def reordered(self: Loader, start: int, stop: int) -> Iterator[Any]:
        if start == 0 or stop == start + 1:  # a new run, or the batch that a load looks at again
            return steps(self, start, stop)
        return (batches for one in order(self, start, stop) for batches in steps(self, one, one + 1))

    Loader.steps = reordered


def _epoch(loader: Loader) -> int:
    return loader._microbatches.schedule.steps_per_epoch


def position_off_by_one() -> None:
    """The batch after the next one is read first."""
    _reading(lambda loader, start, stop: iter(range(start + 1, stop + 1)))


def epoch_begun_anew() -> None:
    """In mid-epoch the epoch's order begins anew."""
    _reading(lambda loader, start, stop: iter(range(start - start % _epoch(loader), stop)))


def epoch_repeated_at_its_edge() -> None:
    """Resumed exactly at the end of an epoch, the loader gives that epoch again."""

    def order(loader: Loader, start: int, stop: int) -> Iterator[int]:
        back = 0 if start % _epoch(loader) else _epoch(loader)
        return iter(range(start - back, stop - back))

    _reading(order)


def only_the_remainder() -> None:
    """Every later epoch, too, begins where the resumed one began."""

    def order(loader: Loader, start: int, stop: int) -> Iterator[int]:
        length = _epoch(loader)
        for epoch in range(start // length, stop + 1):
            yield from range(epoch * length + start % length, (epoch + 1) * length)

    _reading(order)


def rate_from_the_decayed_one() -> None:
    """The rate that the run had when it was saved is taken for optimizer.lr: the schedule is applied twice."""
    rate = step.learning_rate
    first: list[int] = []

    def decayed(optimizer: Any, total: int, number: int) -> float:
        first.append(number)
        base = rate(optimizer, total, first[0] - 1) if first[0] else optimizer.lr
        return rate(optimizer.model_copy(update={"lr": base}), total, number)

    step.learning_rate = decayed


def rate_stepped_by_every_rank() -> None:
    """The schedule goes on by one step for each rank."""
    rate = step.learning_rate
    step.learning_rate = lambda optimizer, total, number: rate(
        optimizer, total, min(number * dist.get_world_size(), total - 1)
    )


def _saved_one_step_late(chosen: Callable[[str], bool]) -> None:
    """These tensors are saved as they were one step before; all else is of this step."""
    update, tensors_of = loop.update, saving.tensors_of
    before: dict[str, torch.Tensor] = {}

    def remembering(training: Training, number: int) -> float:
        before.clear()
        before.update({name: tensor.clone() for name, tensor in tensors_of(training).items() if chosen(name)})
        return update(training, number)

    loop.update = remembering
    saving.tensors_of = lambda training: {**tensors_of(training), **before}


def weights_saved_one_step_late() -> None:
    """The step counter of this step with the weights of the one before."""
    _saved_one_step_late(lambda name: name.startswith("model."))


def moments_saved_one_step_late() -> None:
    """The weights of this step with the moments of the one before."""
    _saved_one_step_late(lambda name: name.endswith((".exp_avg", ".exp_avg_sq")))


def validation_left_out() -> None:
    """What was due after the checkpoint's step is not done by the run that goes on."""
    evaluate = loop.evaluate
    calls: list[int] = []

    def once_less(training: Training, number: int, *rest: Any) -> bool:
        calls.append(number)
        return True if calls == [number] and number > 0 else evaluate(training, number, *rest)

    loop.evaluate = once_less


def metrics_not_taken_back() -> None:
    """Steps that are done again are written down twice."""
    Marker.cut_back = lambda self, to: True


def masks_of_a_new_run() -> None:
    """Dropout counts its steps from the resume on."""
    start: list[int] = []
    accumulate = loop.accumulate

    def counted(training: Training, batches: Any, pending: Any) -> Any:
        if not start and batches[0].step:  # the mock batch, and a new run's first, are of step 0
            start.append(batches[0].step if batches[0].step > 1 else 0)
        if start:
            batches = [replace(batch, step=batch.step - start[0]) for batch in batches]
        return accumulate(training, batches, pending)

    loop.accumulate = counted
