"""What the tests of precision run in ranks: a small decoder on real text, and what its tensors are made of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.launch.stop import StopRequest
from fourfold.parallel.clip import local
from fourfold.plan.run_plan import RunPlan, make_run_plan
from fourfold.record.run_dir import RunDir
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.train import loop
from fourfold.train.scaler import LossScale
from fourfold.train.setup import Training, open_training
from fourfold.train.step import accumulate, agree_totals, clip, update
from fourfold.verify.here import joined_here

SMALL = (
    "model.layers=2",
    "model.width=32",
    "data.sequence=32",
    "data.validation_fraction=0.0",
    "batch.global_batch=4",
    "batch.micro_batch=1",
    "optimizer.warmup_steps=0",
    "run.steps=4",
    "run.log_every=2",
    "run.validate_every=0",
)


def plan(world: int, *sets: str) -> RunPlan:
    return make_run_plan(load_spec("tiny", [*SMALL, *sets]), world, ("test",))


@contextmanager
def opened(*sets: str) -> Iterator[Training]:
    spec = settle(load_spec("tiny", [*SMALL, *sets]).spec, dist.get_world_size())
    with open_training(spec, joined_here()) as training:
        yield training


def one_backward(training: Training, step: int = 0) -> Any:
    batches = next(training.loader.steps(step, step + 1))
    return accumulate(training, batches, agree_totals(training, batches, False))


class _Ops(TorchDispatchMode):
    """By operator, the floating dtypes that go in, and those that come out."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, set[torch.dtype]] = defaultdict(set)
        self.given: dict[str, list[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        floats = [a for a in args if isinstance(a, Tensor) and (a.is_floating_point() or a.is_complex())]
        self.taken[name] |= {a.dtype for a in floats}
        out = result if isinstance(result, tuple) else (result,)
        self.given[name] = [o.dtype for o in out if isinstance(o, Tensor)]
        return result


def dtypes_in_forward(*sets: str) -> dict[str, Any]:
    """What a forward computes in, by module and by operator; and what lies still between two steps."""
    outputs: dict[str, set[str]] = defaultdict(set)

    def watch(module: Any, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[type(module).__name__.removeprefix("FSDP")].add(str(output.dtype))

    with opened(*sets) as training:
        for module in training.model.modules():
            module.register_forward_hook(watch)
        with _Ops() as ops:
            pair, _ = one_backward(training)
        gradients = {str(p.grad.dtype) for p in training.model.parameters() if p.grad is not None}
        update(training, 0)
        turns = [t for key, t in training.model.cached._made.items() if key[0] == "turns"]
        return {
            "outputs": {name: sorted(found) for name, found in outputs.items()},
            "taken": {name: sorted(map(str, found)) for name, found in ops.taken.items()},
            "given": {name: list(map(str, found)) for name, found in ops.given.items()},
            "loss": str(pair.sum.dtype),
            "gradients": sorted(gradients),
            "parameters": sorted({str(p.dtype) for p in training.model.parameters()}),
            "moments": sorted(
                {
                    str(slot.dtype)
                    for name in training.optimizer.trained
                    for slot in training.optimizer.state_of(name).values()
                }
            ),
            "turns": sorted({str(t.dtype) for t in turns}),
        }


def steps(count: int, *sets: str) -> list[tuple[float, float]]:
    """Loss and norm of the first steps."""
    seen = []
    with opened(*sets) as training:
        for number in range(count):
            pair, totals = one_backward(training, number)
            total = pair.sum.clone() if training.parallel.counts else torch.zeros_like(pair.sum)
            dist.all_reduce(total)
            seen.append((float(total) / totals.count, float(clip(training))))
            update(training, number)
    return seen


def on_the_wire(*sets: str) -> dict[str, list[str]]:
    """The dtypes of what a step sends, by collective; gloo's own functions are asked."""
    sent: dict[str, set[str]] = defaultdict(set)

    def noting(name: str, keep: Any, which: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = (args + tuple(kwargs.values()))[which]
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 8:
                sent[name].add(str(tensor.dtype))
            return keep(*args, **kwargs)

        return call

    with (
        opened(*sets) as training,
        patch.object(dist, "all_reduce", noting("all_reduce", dist.all_reduce, 0)),
        patch.object(dist, "reduce_scatter_single", noting("reduce_scatter", dist.reduce_scatter_single, 1)),
        patch.object(dist, "all_gather_into_tensor", noting("all_gather", dist.all_gather_into_tensor, 1)),
        patch.object(dist, "all_gather_single", noting("all_gather", dist.all_gather_single, 1)),
    ):
        one_backward(training)
    return {name: sorted(found) for name, found in sent.items()}


def overflow(where: str, *sets: str) -> dict[str, Any]:
    """Two good steps, and between them one with an Inf of rank 1 alone: in its loss, its backward, or its share."""
    keep = LossScale.unscale

    def planted(scale: LossScale, gradients: Any, factor: float = 1.0) -> None:
        if where == "share" and number == 1 and dist.get_rank() == 1:
            gradients[-1].view(-1)[0] = math.nan
        keep(scale, gradients, factor)

    seen: dict[str, Any] = {"scaled": [], "rates": [], "same": []}
    with opened("precision.compute=fp16", *sets) as training, patch.object(LossScale, "unscale", planted):
        for number in range(3):
            batches = next(training.loader.steps(number, number + 1))
            hurt = number == 1 and dist.get_rank() == 1
            if hurt and where in ("loss", "backward"):
                handle = training.model.register_forward_hook(
                    _poison if where == "loss" else _poison_backward
                )
            accumulate(training, batches, agree_totals(training, batches, False))
            if hurt and where in ("loss", "backward"):
                handle.remove()
            clip(training)
            before = _everything(training)
            seen["rates"].append(update(training, number))
            seen["same"].append(
                all(torch.equal(a, b) for a, b in zip(before, _everything(training), strict=True))
            )
            seen["scaled"].append(tuple(training.scale.last))
        seen["scale"] = training.scale.value
        seen["updates"] = {
            int(training.optimizer.state_of(name)["step"]) for name in training.optimizer.trained
        }
    return seen


def _everything(training: Training) -> list[Tensor]:
    """Copies of what this rank holds of parameters and moments, and AdamW's counts."""
    states = [training.optimizer.state_of(name) for name in training.optimizer.trained]
    held = [local(p) for p in training.model.parameters()]
    return [t.clone() for t in [*held, *(slot for state in states for slot in state.values())]]


def _poison(_module: Any, _args: Any, output: Tensor) -> Tensor:
    return output * math.inf


def _poison_backward(_module: Any, _args: Any, output: Tensor) -> Tensor:
    copy = output * 1.0
    copy.register_hook(lambda g: g * math.nan)
    return copy


def live(folder: str, *sets: str, resume: str | None = None) -> str:
    """A run; how it ends, or the text of what ends it."""
    asked = plan(dist.get_world_size(), *sets).model_copy(update={"resume_from": resume})
    with StopRequest() as stop:
        try:
            return loop.train(asked, joined_here(), RunDir(folder), stop, lambda *_: None)  # type: ignore[arg-type]
        except Exception as error:  # its text is looked at
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def without_bf16() -> str:
    """What opening a run in bf16 says where torch has no bf16."""
    from fourfold.spec.errors import SpecError
    from fourfold.train import precision, setup

    def none(dtype: torch.dtype, device: Any) -> None:  # noqa: ARG001
        raise RuntimeError("not implemented")

    def never(*_: Any) -> Any:
        raise AssertionError("the data were opened")

    with patch.object(precision, "_try", none), patch.object(setup, "open_sources", never):
        try:
            with opened("precision.compute=bf16"):
                return ""
        except SpecError as error:
            return str(error)


def resumed(folder: str, checkpoint: str, *sets: str) -> str:
    return live(folder, *sets, resume=checkpoint)


def loads_without_scale(folder: str, *sets: str) -> str:
    """What loading says to a checkpoint whose state was written before there was a loss scale; "" if it loads."""
    from pathlib import Path

    from fourfold.spec.errors import DataError
    from fourfold.train.saving import load_state, save_state
    from fourfold.train.state import PlainState

    keep = PlainState.model_dump

    def older(state: PlainState, **how: Any) -> dict[str, Any]:
        return {key: value for key, value in keep(state, **how).items() if key != "loss_scale"}

    with opened(*sets) as training, patch.object(PlainState, "model_dump", older):
        batches = next(training.loader.steps(0, 1))
        accumulate(training, batches, agree_totals(training, batches, False))
        update(training, 0)
        run = RunDir(Path(folder))
        path = save_state(training, run, 0, batches, _mark())
        try:
            load_state(training, path)
        except DataError as error:
            return str(error)
    return ""


def _mark() -> Any:
    from fourfold.record.rewind import START

    return START


def loss_of_rank_1_is_inf(folder: str, *sets: str) -> str:
    """A run in which the loss of the last rank is infinite from the second step on; the text of what ends it."""
    keep = loop.accumulate

    def poisoned(training: Any, batches: Any, pending: Any) -> Any:
        last = dist.get_rank() == dist.get_world_size() - 1
        if training.beat.__name__ != "beat" and batches[0].step >= 1 and last:  # not while warming up
            handle = training.model.register_forward_hook(_poison)
            try:
                return keep(training, batches, pending)
            finally:
                handle.remove()
        return keep(training, batches, pending)

    with patch.object(loop, "accumulate", poisoned):
        return live(folder, *sets)


def copy_of_rank_1_overflows() -> None:
    """A run under DDP in whose second step one rank's copy of the reduced gradient has an Inf."""
    import tempfile

    unscale = LossScale.unscale
    calls: dict[LossScale, int] = {}

    def planted(scale: LossScale, gradients: Any, factor: float = 1.0) -> None:
        calls[scale] = calls.get(scale, 0) + 1
        if calls[scale] == 2 and dist.get_rank() == 1:
            gradients[0].view(-1)[0] = math.inf
        unscale(scale, gradients, factor)

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    with patch.object(LossScale, "unscale", planted), StopRequest() as stop:
        loop.train(
            plan(2, "precision.compute=fp16"),
            joined_here(),
            RunDir(folder[0]),
            stop,
            lambda *_: None,  # type: ignore[arg-type]
        )
