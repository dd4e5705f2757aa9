"""One step, rehearsed in one process for any world: torch's fake tensors for the model, its fake group for the others.

Everything but the values is the real thing: the user's model, the sharding, FSDP2, the optimizer. So it shows what
cannot be built or computed, what each moment of a step holds, and which collectives it asks for, before a rank starts.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold.collectives.count import Collectives
from fourfold.data.blank import blank_sources
from fourfold.launch.pool import RankPool
from fourfold.launch.rank import Joined, Rank
from fourfold.models.protocol import BoxedKit, ModelKit
from fourfold.models.registry import kit_for
from fourfold.parallel.apply import Parallel, is_cut, is_sharded, parallelize
from fourfold.parallel.balance import corrections
from fourfold.parallel.initial import give_memory
from fourfold.parallel.narrow import loss_module
from fourfold.parallel.offload import MappedMoments
from fourfold.plan.rehearsal import Rehearsal
from fourfold.plan.run_plan import RunPlan, with_rehearsal, without_step
from fourfold.plan.state_bytes import Category
from fourfold.spec.errors import EXIT_CHECK_FAILED, CheckFailed, FourfoldError, Problem, RankFailed
from fourfold.spec.grid import Grid
from fourfold.spec.model import ImportSpec
from fourfold.spec.spec import Spec
from fourfold.train.as_real import AsReal
from fourfold.train.live import LiveBytes
from fourfold.train.precision import parameter_dtype, require_device
from fourfold.train.rehearsed_step import Watch
from fourfold.train.setup import Training, assembled, no_beat

_CPU = torch.device("cpu")
_LONGEST_S = 3600.0  # a model of many thousand operations takes minutes


class Unreadable(NamedTuple):
    """Why a step could not be rehearsed, though it may well run: it reads values. What was seen before stands beside.

    parameters: of the whole model. held: what rank 0 has after init.
    """

    why: str
    parameters: int
    held: Mapping[Category, int]


def foreseen(plan: RunPlan) -> RunPlan:
    """`plan` with its step rehearsed, or a note that says why it could not be. Raises what `rehearse` raises."""
    found = rehearse(plan.spec)
    if isinstance(found, Rehearsal):
        return with_rehearsal(plan, found)
    note = f"not rehearsed, though it may well run: {found.why}"
    return without_step(plan, found.parameters, found.held, note)


def rehearse(spec: Spec) -> Rehearsal | Unreadable:
    """Rehearse a step of rank 0 of the settled `spec`, in a process of its own; nothing is written.

    Raises what a rank would raise of the model and its sharding table, SpecError or CheckFailed; FourfoldError, exit
    code 1, for an error of the user's own code; RankFailed where the process was gone. Blocks are not compiled: code is
    made of values' real shapes alone.
    """
    plain = {"compile": "none", "compile_backend": "inductor"}
    spec = spec.model_copy(update={"layout": spec.layout.model_copy(update=plain)})
    with RankPool(1, timeout_s=_LONGEST_S) as pool:
        try:
            return pool.run(rehearse_here, spec)[0]
        except RankFailed as error:
            refused = error.refusal()
            if refused is None and error.told:
                kind = CheckFailed if error.exit_code == EXIT_CHECK_FAILED else FourfoldError
                refused = kind(error.told)
            if refused is None:
                raise
            raise refused from error  # --debug shows what is behind it


def rehearse_here(spec: Spec) -> Rehearsal | Unreadable:
    """The same in this process, which is good for nothing else afterwards: its process group is a fake one."""
    os.dup2(2, 1)  # stdout is the result's: a user's model may print
    _as_eager()
    warnings.simplefilter("ignore")  # of what is only rehearsed
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # it logs what is raised, too
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=Grid.of(spec.layout).world)
    try:
        return _rehearsed(spec)
    except FourfoldError:
        raise
    except Exception as error:
        if not isinstance(spec.model, ImportSpec):
            raise
        raise FourfoldError(
            Problem(
                asked=f'a step of model.target = "{spec.model.target}", rehearsed without values',
                found=f"{type(error).__name__}: {_first(error)} ({_place(error)})",
                why="a real step would end there too, unless it is values that are missed",
                instead="mend it there; --debug shows the whole traceback",
            )
        ) from error


def _as_eager() -> None:
    """Have torch take fake tensors for real ones: else it takes them for a compilation, which does other things.

    DTensor would look for shardings anew at each operation, and wait for each collective at once.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.") and hasattr(module, "_are_we_tracing"):
            setattr(module, "_are_we_tracing", lambda: False)  # noqa: B010  # mypy knows no such name


def _rehearsed(spec: Spec) -> Rehearsal | Unreadable:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    live, collectives = LiveBytes(), Collectives()
    training, parameters = _built(spec, mode, live)
    watch = Watch(training, live, collectives)
    try:
        with mode, AsReal(), live, collectives:  # type: ignore[no-untyped-call]
            watch.run()
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        why = f"{_place(error)} reads values, or has no shape without them ({_first(error)})"
        return Unreadable(why, parameters, watch.at["after init"])
    return watch.told(parameters)


def _built(spec: Spec, mode: FakeTensorMode, live: LiveBytes) -> tuple[Training, int]:
    """What `open_training` builds, without values; and the parameters of the whole model."""
    require_device(spec.precision, _CPU)
    kit, dtype, layout = kit_for(spec), parameter_dtype(spec.precision), spec.layout
    network = _on_meta(kit, spec.run.seed, dtype)
    parameters = sum(parameter.numel() for parameter in network.parameters()) + corrections(network)
    sharded = is_sharded(layout, _CPU)
    module = loss_module(kit, network, spec.precision, sharded)
    parallel: Parallel | None = None
    if sharded or is_cut(layout):  # on the meta device, as it is cut in a run
        parallel = parallelize(module, layout, _CPU, spec.precision, spec.run.exact)
    with mode, live:
        if parallel is not None:
            for part in parallel.modules:
                give_memory(part, _CPU)
        else:
            _remake(module, lambda tensor: torch.empty_like(tensor, device=_CPU))
            parallel = parallelize(module, layout, _CPU, spec.precision, spec.run.exact)
        room = _unmapped if layout.offload == "disk" else None
        joined = Joined(Rank(0, 0, parallel.grid.world, parallel.grid.world), FakeStore(), _CPU)
        training = assembled(spec, joined, kit, module, parallel, blank_sources(spec), room, {}, no_beat)
        if room is not None:
            live.elsewhere(training.optimizer.tensors[0])
    return training, parameters


def _on_meta(kit: ModelKit, seed: int, dtype: torch.dtype) -> nn.Module:
    """The network on the meta device; where its kit cannot make it there, it is made whole first, as on every rank."""
    if isinstance(kit, BoxedKit):
        return kit.skeleton(dtype)
    network = kit.build(seed, dtype)
    _remake(network, lambda tensor: tensor.to("meta"))
    return network


def _remake(network: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Put what `make` gives of each parameter and buffer in its place; ties stay ties."""
    made: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(make(parameter.detach()), parameter.requires_grad)
            module.register_parameter(key, made[id(parameter)])
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, key, make(buffer))


def _unmapped(of: Mapping[str, Tensor]) -> MappedMoments:
    return MappedMoments(of, lambda size: torch.empty(size, dtype=torch.uint8))


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _place(error: Exception) -> str:
    """Where it was raised last outside of torch, and of this package if it came from a model of the user's."""
    ours = str(Path(__file__).parents[1]) + os.sep
    found = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}torch{os.sep}" not in frame.filename
    ]
    theirs = [place for place in found if not place[0].startswith(ours)] or found
    return f"{theirs[-1][0]}:{theirs[-1][1]}" if theirs else "torch"
