"""Everything one rank holds while it trains, built in a fixed order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fourfold.data.loader import Loader
from fourfold.data.schedule import BatchSchedule
from fourfold.data.source import Sources, open_sources
from fourfold.launch.rank import Joined
from fourfold.models.protocol import BoxedKit, LossModule, ModelKit
from fourfold.models.registry import kit_for
from fourfold.parallel.apply import Parallel, is_cut, is_sharded, parallelize
from fourfold.parallel.compile import require_compiler
from fourfold.parallel.initial import fill_boxes
from fourfold.parallel.narrow import loss_module
from fourfold.parallel.offload import MappedMoments, home, mapped
from fourfold.spec.spec import Spec
from fourfold.spec.training import EXACT_THREADS
from fourfold.train.census import check_boxes, check_parameters, check_request
from fourfold.train.optimizer import Optimizer
from fourfold.train.precision import parameter_dtype, require_device, settle_order, settle_products
from fourfold.train.scaler import LossScale
from fourfold.train.streams import seed_streams


class Beat(Protocol):
    """A sign of life: step (from 1) and phase; `patient`: the phase may honestly last long (see launch.pulse)."""

    def __call__(self, step: int, phase: str, patient: bool = False) -> None: ...


Room = Callable[[Mapping[str, Tensor]], MappedMoments]
"""Makes room on disk for the moments of what is held, by name."""


def no_beat(step: int, phase: str, patient: bool = False) -> None:
    """Nobody watches: no pulse is kept."""


def _nobody() -> None:
    """Nobody wants to be told."""


@dataclass(slots=True)
class Training:
    """One rank's share of a run. `spec` is settled; `model` is the bare module, `parallel` the spread one.

    between: told after the first microbatch of a step that is not its last one, where there are no stages.
    """

    spec: Spec
    joined: Joined
    kit: ModelKit
    model: nn.Module
    loss_module: LossModule
    parallel: Parallel
    optimizer: Optimizer
    scale: LossScale
    sources: Sources
    schedule: BatchSchedule
    loader: Loader
    census: dict[str, str]
    beat: Beat = field(default=no_beat)
    between: Callable[[], None] = field(default=_nobody)

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
        by_rank=spec.run.exact,
    )


def _room_on_disk(spec: Spec, joined: Joined, scratch: Path | None) -> Room:
    asked = spec.layout.offload_dir
    folder = Path(os.path.expanduser(asked)) if asked is not None else scratch or Path(gettempdir())
    return lambda held: MappedMoments(held, partial(mapped, folder, joined.rank.rank))


@contextmanager
def open_training(
    spec: Spec,
    joined: Joined,
    *,
    sources: Sources | None = None,
    beat: Beat = no_beat,
    scratch: Path | None = None,
) -> Iterator[Training]:
    """Open the data, build the model, spread it, build the optimizer over what is trained; close the loader at the end.

    spec: settled for `joined.rank.world`. sources: opened data, if the caller has it already. scratch: the folder for
    what `layout.offload` maps, where the Spec names none; default: the system's for temporary files.
    Collectives: two all-gathers of objects (the census), then those of `parallelize`.
    Raises SpecError for a precision that the device does not have, or a compiler that it lacks, DataError or
    SpecError for data that cannot be trained on, CheckFailed where ranks differ, DataError where moments have no room
    on disk.
    """
    require_device(spec.precision, joined.device)
    require_compiler(spec.layout, joined.device)
    if sources is None:
        sources = open_sources(spec)
    census = check_request(spec, joined.rank, sources.content_hash)
    kit = kit_for(spec)
    seed, dtype = spec.run.seed, parameter_dtype(spec.precision)
    held = is_sharded(spec.layout, joined.device)
    if is_cut(spec.layout) and isinstance(kit, BoxedKit):
        module = loss_module(kit, kit.skeleton(dtype), spec.precision, held)
        parallel = parallelize(module, spec.layout, joined.device, spec.precision, spec.run.exact)
        for part in parallel.modules:
            fill_boxes(part, kit, seed, home(spec.layout, joined.device))
        census |= check_boxes(parallel.network)
    else:
        module = loss_module(kit, kit.build(seed, dtype), spec.precision, held)
        census |= check_parameters(module.module)
        parallel = parallelize(module, spec.layout, joined.device, spec.precision, spec.run.exact)
    settle_products(spec.precision)  # after what a user's model may set when it is built
    if spec.run.exact:
        settle_order(spec.hardware.threads_per_rank or EXACT_THREADS)
    seed_streams(seed, joined.rank.rank)
    room = _room_on_disk(spec, joined, scratch) if spec.layout.offload == "disk" else None
    training = assembled(spec, joined, kit, module, parallel, sources, room, census, beat)
    try:
        yield training
    finally:
        training.loader.close()


def assembled(
    spec: Spec,
    joined: Joined,
    kit: ModelKit,
    module: LossModule,
    parallel: Parallel,
    sources: Sources,
    room: Room | None,
    census: dict[str, str],
    beat: Beat,
) -> Training:
    """The optimizer, the loader and the rest around a `module` that is spread. room: of moments on disk.

    Collectives: none. Raises DataError where moments have no room, SpecError for a transform that does not fit.
    """
    model = parallel.network
    schedule = batch_schedule(spec, len(sources.train), parallel.degree)
    return Training(
        spec,
        joined,
        kit,
        model,
        module,
        parallel,
        Optimizer(dict(model.named_parameters()), spec.optimizer, room, elementwise=spec.run.exact),
        LossScale(spec.precision),
        sources,
        schedule,
        Loader(
            sources.train,
            schedule,
            parallel.dp_rank,
            spec.run.seed,
            workers=spec.data.workers,
            transforms=spec.data.transforms,
            own=parallel.own,
        ),
        census,
        beat,
    )
