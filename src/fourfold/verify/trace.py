"""Fingerprints of everything one microbatch computes, in execution order, row by row.

A row of the global batch has the same fingerprints however the batch is cut into microbatches, so a rank's few rows
can be compared with a reference that computes all of them together, without moving a tensor. A layer that mixes
rows, or draws by a row's place in its microbatch, shows as a deviation: it gives a row other values there.

Of a compiled block is seen what goes in and comes out, and the gradients of its parameters.

What tensor- and context-parallel ranks hold in parts is made whole first (`whole.py`); a row is then whole on each.

A fingerprint is a few fixed pseudo-random projections in fp64: a difference anywhere in a row moves all of them.
Letters: B rows of the microbatch, P projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.data.batch import Batch
from fourfold.models.exchange import Stacks
from fourfold.parallel.clip import local
from fourfold.parallel.compile import surfaces
from fourfold.parallel.recompute import in_backward
from fourfold.record.writer import JsonLines
from fourfold.verify.whole import NETWORK, Whole

PROJECTIONS = 3

# What is noted: the arrays that come in, the modules' outputs, the loss as a pair, the factor that backward puts
# before it, the gradients of the modules' outputs, and the order in which parameters get theirs.
BATCH, FORWARD, LOSS, WEIGHT, BACKWARD, GRADIENT = (
    "batch",
    "forward",
    "loss",
    "weight",
    "backward",
    "gradient",
)
IDS = "rows and sample ids"
# What follows the microbatches, in order: gradients before and after the reduction, norm, scaling, update.
OWN, REDUCED, NORM, CLIPPED, UPDATED = STAGES = (
    "gradient before the reduction",
    "gradient before clipping",
    "norm",
    "clipped gradient",
    "update",
)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing computed.

    values: [B][P] for batch, forward and backward, or [] where dim 0 is not the batch's or nothing is known of the
    other ranks' parts; [[sum, count]] of the loss; [[factor]] of the weight; [] of a parameter's gradient.
    call counts the calls of one module within one microbatch (and its outputs, if it has several).
    """

    kind: str
    name: str
    call: int
    values: list[list[float]]


@lru_cache(maxsize=256)
def _projection(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(20260)
    return torch.randn(length, PROJECTIONS, generator=generator, dtype=torch.float64)


def fingerprint(tensor: Tensor, rows: int) -> list[list[float]]:
    """Projections [rows][P] of each row of a tensor of any real dtype; [] if its dim 0 is not of length `rows`."""
    values = tensor.detach().to(device="cpu", dtype=torch.float64)
    if values.ndim == 0 or len(values) != rows:
        return []
    by_row = values.reshape(rows, values.numel() // rows)
    projected: list[list[float]] = (by_row @ _projection(by_row.shape[1])).tolist()
    return projected


@dataclass(slots=True)
class _Micro:
    """One microbatch under way."""

    rows: int
    events: list[Event] = field(default_factory=list)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)

    def note(self, kind: str, name: str, values: list[list[float]], call: int | None = None) -> int:
        """Record one event; returns its call number."""
        if call is None:
            call = self.calls.get((kind, name), 0)
            self.calls[kind, name] = call + 1
        self.events.append(Event(kind, name, call, values))
        return call


class Tracer:
    """Watches the modules of a rank; hands the events of a microbatch to `sink` when the next one begins.

    In a pipeline several are under way at once: all are handed on at `flush`, in their order.

    Also keeps, until `forget`, the gradients before any reduction but that inside tensor parallel: of each parameter
    summed over the microbatches of the step (`own`) and of the last one (`last`); where a tensor-parallel rank has but
    a part of the sum, that part (`part`); and the factor before the loss (`weight`, None without backward).
    """

    def __init__(
        self,
        loss_modules: Sequence[nn.Module],
        models: Sequence[nn.Module],
        sink: Callable[[Sequence[Event]], None],
        whole: Whole | None = None,
        staged: bool = False,
    ) -> None:
        """loss_modules: the model in one piece, or its stages; models: the network of each, under its own names."""
        self.own: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.part: dict[str, Tensor] = {}
        self._whole = whole or Whole()
        self._hooked: dict[int, Tensor] = {}  # kept, so that an id stays its own
        self.weight: float | None = None
        self._sink, self._staged = sink, staged
        self._micros: dict[tuple[int, ...], _Micro] = {}  # by the rows of each
        self._now = _Micro(1)
        self.step = 0  # of the microbatch at hand
        self._handles = list(_watch(self, loss_modules, models))

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()

    def flush(self) -> None:
        """The step's microbatches are over: hand on what is left of their events."""
        for micro in self._micros.values():
            self._sink(micro.events)
        self._micros = {}

    def forget(self) -> None:
        """The step is over: its gradients are no longer needed."""
        self.own, self.last, self.part, self.weight = {}, {}, {}, None

    def begin(self, batch: Batch) -> None:
        """A microbatch enters a loss module."""
        self._whole.begin(batch.context)
        at = tuple(batch.rows.tolist())
        if at in self._micros and self._staged:  # it has come to another stage of this rank
            self._now = self._micros[at]
            return
        if not self._staged:
            self.flush()
        self._now = self._micros[at] = _Micro(len(at))
        self.step = batch.step
        ids = torch.stack([batch.rows, batch.sample_ids]).T.double()
        self._now.note(BATCH, IDS, ids.tolist())
        for name, tensor in (("inputs", batch.inputs), ("targets", batch.targets), ("valid", batch.valid)):
            self._now.note(BATCH, name, fingerprint(self._whole.tokens(tensor), self._now.rows))

    def computed(self, name: str, output: object) -> None:
        """A module returned: note each tensor of its output, and its gradient when backward comes to it.

        Not where it is computed again in backward: if otherwise than at first, gradients show it.
        """
        if in_backward():
            return
        for tensor in _tensors(output):
            known = self._whole.output(name, tensor)
            micro = self._now
            call = micro.note(FORWARD, name, [] if known is None else fingerprint(known, micro.rows))
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient(name, call, micro))  # type: ignore[no-untyped-call]

    def weighed(self, loss_sum: Tensor, count: Tensor) -> None:
        """The loss of the microbatch: its pair, and later the weight that backward gives it."""
        micro = self._now
        micro.note(LOSS, "the microbatch", [[float(loss_sum.detach()), float(count)]])
        if loss_sum.requires_grad:
            loss_sum.register_hook(lambda gradient: self._on_weight(gradient, micro))  # type: ignore[no-untyped-call]

    def entering(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """A module runs: watch what it holds now of each parameter (key -> name), which may be a gathered copy."""
        if not torch.is_grad_enabled():
            return
        for key, parameter in module.named_parameters(recurse=False):
            if key in names and parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked[id(parameter)] = parameter
                self._handles.append(parameter.register_hook(self._own_gradient(names[key])))  # type: ignore[no-untyped-call]

    def _own_gradient(self, name: str) -> Callable[[Tensor], None]:
        """Sees a parameter's gradient of one microbatch, summed over all its uses, not yet reduced."""

        def hook(gradient: Tensor) -> None:
            self._now.note(GRADIENT, name, [])
            known = self._whole.parameter(gradient)
            if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
                part = local(gradient)
                self.part[name] = self.part[name] + part if name in self.part else part.clone()
            self.last[name] = known.clone()
            self.own[name] = self.own[name] + known if name in self.own else self.last[name]

        return hook

    def _on_weight(self, gradient: Tensor, micro: _Micro) -> None:
        self.weight = float(gradient)
        micro.note(WEIGHT, "the loss", [[self.weight]])

    def _on_gradient(self, name: str, call: int, micro: _Micro) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            known = self._whole.gradient(name, gradient)
            values = [] if known is None else fingerprint(known / (self.weight or 1.0), micro.rows)
            micro.note(BACKWARD, name, values, call)

        return hook


def _watch(tracer: Tracer, loss_modules: Sequence[nn.Module], models: Sequence[nn.Module]) -> Iterator[Any]:
    """Hooks on the loss modules, every module of the model under its bare name, and through it its parameters."""

    def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        tracer.begin(inputs[0])

    def leave(_module: nn.Module, _inputs: Any, output: Tensor | tuple[Tensor, Tensor]) -> None:
        if not isinstance(output, Tensor):  # not from the last stage: a stream
            tracer.weighed(*output)

    for module in loss_modules:
        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)
    first: dict[int, str] = {}
    around = {module: surface for model in models for module, surface in surfaces(model).items()}
    for prefix, module in (named for model in models for named in model.named_modules()):
        label = prefix or NETWORK
        names = {
            key: first.setdefault(id(parameter), f"{prefix}.{key}" if prefix else key)
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        if names:
            yield around[module].register_forward_pre_hook(
                lambda _m, _i, module=module, names=names: tracer.entering(module, names)
            )
        if isinstance(module, Stacks) or around[module] is not module:
            continue  # sorted by expert: rows are no rows of the batch; or a part of compiled code
        yield module.register_forward_hook(lambda _m, _i, output, label=label: tracer.computed(label, output))


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if not output.is_complex():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


@contextmanager
def tracing(
    loss_modules: Sequence[nn.Module],
    models: Sequence[nn.Module],
    lines: JsonLines,
    whole: Whole | None = None,
    staged: bool = False,
) -> Iterator[Tracer]:
    """A Tracer that writes one line for each event: step, micro (counted within the step), kind, name, call, values."""
    seen: dict[int, int] = {}

    def sink(events: Sequence[Event]) -> None:
        micro = seen.get(tracer.step, 0)
        seen[tracer.step] = micro + 1
        for event in events:
            lines.write(
                {
                    "step": tracer.step,
                    "micro": micro,
                    "kind": event.kind,
                    "name": event.name,
                    "call": event.call,
                    "values": event.values,
                }
            )

    tracer = Tracer(loss_modules, models, sink, whole, staged)
    try:
        yield tracer
    finally:
        tracer.flush()
        tracer.close()
