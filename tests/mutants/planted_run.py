"""Kinds of faults of the loop, its records and its checkpoints that no other file plants, for `make mutants`."""
# ruff: noqa: ARG005 - a stand-in has the parameters of what it replaces

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.checkpoint import storage_writer
from fourfold.models.initial import Linear
from fourfold.train import loop, recorder, saver, saving, setup, state, step
from fourfold.train.meter import Meter
from fourfold.train.recorder import Recorder
from fourfold.train.setup import Training
from fourfold.train.step import LossPair
from tests.train import invariant_jobs
from tests.verify.faults import resume_faults

put: Any = setattr


def replaced_after_the_optimizer_was_built() -> None:
    """A module gets a new parameter when the optimizer has the old one."""
    assembled = setup.assembled

    def replacing(*given: Any) -> Training:
        training = assembled(*given)
        name = next(n for n, p in training.model.named_parameters() if p.ndim == 1)
        module, _, key = name.rpartition(".")
        held = training.model.get_submodule(module)
        setattr(held, key, nn.Parameter(getattr(held, key).detach().clone()))
        return training

    put(setup, "assembled", replacing)


def kernels_by_chance() -> None:
    """Each process sums its products in an order of its own, as an autotuner's choice may be."""
    forward, halves = Linear.forward, os.urandom(1)[0] % 2 == 0

    def product(self: Any, x: Any) -> Any:
        if type(self.weight) is not nn.Parameter or not halves:
            return forward(self, x)
        cut = self.in_features // 3
        first = F.linear(x[..., :cut], self.weight[:, :cut])
        return first + F.linear(x[..., cut:], self.weight[:, cut:], self.bias)

    put(Linear, "forward", product)


# ---- what is written down


def validation_never_runs() -> None:
    """No validation is ever done."""
    put(loop, "evaluate", lambda *_: True)


def columns_swapped_on_rank_1() -> None:
    """Rank 1 has the columns of the metrics in another order: its loss is added to the others' counts."""
    add = Meter.add

    def swapped(self: Meter, number: int, batches: Any, pair: LossPair, *more: Any) -> None:
        if dist.get_rank() == 1:
            pair = replace(pair, sum=pair.count.double(), count=pair.sum.round().long())
        add(self, number, batches, pair, *more)

    put(Meter, "add", swapped)


def metrics_not_written() -> None:
    """The metrics go nowhere."""
    made = recorder.Meter
    put(recorder, "Meter", lambda lines, counts: made(None, counts))


def events_not_written() -> None:
    """What a rank did in its steps is written down nowhere."""
    event = Recorder._event
    put(
        Recorder,
        "_event",
        lambda self, kind, *more, **values: None if kind == "step" else event(self, kind, *more, **values),
    )


# ---- checkpoints


def one_rank_saves_the_step_before() -> None:
    """Rank 1's part of a checkpoint is of the step before: half of it is of another step."""
    if dist.get_rank() == 1:
        resume_faults._saved_one_step_late(lambda name: name.startswith(("model.", "optimizer.")))


def never_published() -> None:
    """The save ends, and the folder keeps the name of one that was not finished."""
    put(storage_writer, "publish", lambda folder, *_: folder)


def published_before_it_is_durable() -> None:
    """The name is there and the last shard is not whole, as after a power cut without a flush."""
    publish = storage_writer.publish

    def cut(*given: Any) -> Path:
        folder = publish(*given)
        shard = max(folder.glob("*.safetensors"))
        os.truncate(shard, shard.stat().st_size // 2)
        return folder

    put(storage_writer, "publish", cut)


def another_checkpoint_loaded() -> None:
    """Whatever is asked for, the oldest checkpoint beside it is loaded."""
    load = saver.load_state
    put(saver, "load_state", lambda training, folder: load(training, min(folder.parent.glob("step-*"))))


def buffers_joined_over_ranks() -> None:
    """What every rank holds alike is joined, rank after rank, when it is saved."""
    tensors_of = saving.tensors_of

    def joined(training: Training) -> dict[str, Tensor]:
        buffers = {f"model.{name}" for name, buffer in training.model.named_buffers() if buffer.ndim}
        world = dist.get_world_size()
        return {n: torch.cat([t] * world) if n in buffers else t for n, t in tensors_of(training).items()}

    put(saving, "tensors_of", joined)


def layers_by_their_place_in_the_stage() -> None:
    """Every stage counts its blocks from 0, when it saves and when it loads."""
    tensors_of = state.tensors_of

    def counted(training: Training) -> dict[str, Tensor]:
        held = tensors_of(training)
        numbers = sorted({int(found[1]) for name in held if (found := re.search(r"blocks\.(\d+)\.", name))})
        place = {number: at for at, number in enumerate(numbers)}

        def own(found: re.Match[str]) -> str:
            return f"blocks.{place[int(found[1])]}."

        return {re.sub(r"blocks\.(\d+)\.", own, name): tensor for name, tensor in held.items()}

    put(state, "tensors_of", counted)
    put(saving, "tensors_of", counted)


# ---- what tests/train/invariant_jobs.py breaks on one rank, in the third step of any run


def _in_the_third_step(change: Callable[[Training], None]) -> None:
    update = step.update

    def changing(training: Training, number: int) -> float:
        rate = update(training, number)
        if number == 2 and dist.get_rank() == dist.get_world_size() - 1:
            change(training)
        return rate

    put(step, "update", changing)
    put(loop, "update", changing)


def __getattr__(name: str) -> Callable[[], None]:
    """`broken_<fault>` plants that fault of `invariant_jobs`."""
    fault = name.removeprefix("broken_")
    if fault == name or fault not in invariant_jobs.FAULTS:
        raise AttributeError(name)
    return lambda: _in_the_third_step(invariant_jobs.FAULTS[fault])
