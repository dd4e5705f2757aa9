"""Everything one rank holds while it trains, built in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.nn import Parameter

from fourfold.data.loader import Loader
from fourfold.data.schedule import BatchSchedule
from fourfold.data.source import Sources, open_sources
from fourfold.launch.rank import Joined
from fourfold.models.protocol import LossModule, ModelKit
from fourfold.models.registry import kit_for
from fourfold.parallel.apply import Parallel, parallelize
from fourfold.spec.spec import Spec
from fourfold.train.census import check_parameters, check_request
from fourfold.train.optimizer import build_optimizer
from fourfold.train.precision import parameter_dtype
from fourfold.train.streams import seed_streams


class Beat(Protocol):
    """A sign of life: step (from 1) and phase; `patient`: the phase may honestly last long (see launch.pulse)."""

    def __call__(self, step: int, phase: str, patient: bool = False) -> None: ...


def _no_beat(step: int, phase: str, patient: bool = False) -> None:
    """Nobody watches: no pulse is kept."""


@dataclass(slots=True)
class Training:
    """One rank's share of a run. `spec` is settled; `model` is the bare module, `parallel` the spread one."""

    spec: Spec
    joined: Joined
    kit: ModelKit
    model: nn.Module
    loss_module: LossModule
    parallel: Parallel
    optimizer: torch.optim.Optimizer
    sources: Sources
    schedule: BatchSchedule
    loader: Loader
    census: dict[str, str]
    beat: Beat = field(default=_no_beat)

    @property
    def device(self) -> torch.device:
        return self.joined.device

    @property
    def dtype(self) -> torch.dtype:
        return parameter_dtype(self.spec.precision)

    def named_parameters(self) -> dict[str, Parameter]:
        """Parameters by the bare model's names; a tied one appears once, under its first name."""
        return dict(self.model.named_parameters())


def batch_schedule(spec: Spec, samples: int, degree: int) -> BatchSchedule:
    """How the settled Spec's global batches are cut over `degree` data-parallel ranks."""
    batch = spec.batch
    assert batch.global_batch and batch.micro_batch and batch.accumulation, "the Spec is not settled"
    return BatchSchedule(
        samples=samples,
        global_batch=batch.global_batch,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        degree=degree,
        seed=spec.run.seed,
        shuffle=spec.data.shuffle,
        last_batch=spec.data.last_batch,
    )


@contextmanager
def open_training(
    spec: Spec,
    joined: Joined,
    *,
    sources: Sources | None = None,
    beat: Beat = _no_beat,
) -> Iterator[Training]:
    """Open the data, build the model, spread it, build the optimizer over what is trained; close the loader at the end.

    spec: settled for `joined.rank.world`. sources: opened data, if the caller has it already.
    Collectives: two all-gathers of objects (the census), then those of `parallelize`.
    Raises DataError or SpecError for data that cannot be trained on, CheckFailed where ranks differ.
    """
    if sources is None:
        sources = open_sources(spec)
    census = check_request(spec, joined.rank, sources.content_hash)
    kit = kit_for(spec)
    model = kit.build(spec.run.seed, parameter_dtype(spec.precision))
    census |= check_parameters(model)
    loss_module = LossModule(kit, model)
    parallel = parallelize(loss_module, spec.layout, joined.device)
    seed_streams(spec.run.seed, joined.rank.rank)
    optimizer = build_optimizer(dict(model.named_parameters()), spec.optimizer)
    schedule = batch_schedule(spec, len(sources.train), parallel.degree)
    loader = Loader(
        sources.train,
        schedule,
        parallel.dp_rank,
        spec.run.seed,
        workers=spec.data.workers,
        transforms=spec.data.transforms,
    )
    try:
        yield Training(
            spec,
            joined,
            kit,
            model,
            loss_module,
            parallel,
            optimizer,
            sources,
            schedule,
            loader,
            census,
            beat,
        )
    finally:
        loader.close()
