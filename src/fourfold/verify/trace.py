"""Fingerprints of everything one microbatch computes, in execution order.

The reference and every rank are traced in the same blocks: block b of a step holds the rows
[b × micro_batch, (b + 1) × micro_batch) of the global batch, so any cut of the batch over ranks and microbatches
can be compared block by block, row by row, without moving a tensor.

A fingerprint is a few fixed pseudo-random projections in fp64: a difference anywhere in a row moves all of them.
Letters: B rows of the block, P projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.data.batch import Batch
from fourfold.record.writer import JsonLines

PROJECTIONS = 3

# In the order in which one microbatch goes through them.
BATCH, FORWARD, LOSS, WEIGHT, BACKWARD, GRADIENT = (
    "batch",
    "forward",
    "loss",
    "weight",
    "backward",
    "gradient",
)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing computed: `values` is a list of rows [B][P] (batch, forward, backward) or of one row.

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


def fingerprint(tensor: Tensor, rows: int = 1) -> list[list[float]]:
    """Projections [.., P] of each row of a tensor (any real dtype) whose dim 0 has length `rows`; else of the whole."""
    values = tensor.detach().to(device="cpu", dtype=torch.float64)
    if values.ndim == 0 or len(values) != rows:
        rows = 1
    by_row = values.reshape(rows, values.numel() // rows)
    projected: list[list[float]] = (by_row @ _projection(by_row.shape[1])).tolist()
    return projected


class Tracer:
    """Watches one loss module; hands the events of a microbatch to `sink` when the next one begins, or at `flush`.

    Also keeps, per parameter, this rank's own gradient summed over the microbatches of the step (`own`) and that
    of the last one (`last`), as they were before any reduction.
    """

    def __init__(
        self, loss_module: nn.Module, model: nn.Module, sink: Callable[[Sequence[Event]], None]
    ) -> None:
        self.own: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self._sink = sink
        self._events: list[Event] = []
        self._calls: dict[tuple[str, str], int] = {}
        self.step = 0  # of the microbatch at hand
        self._rows = 1
        self._weight = 1.0
        self._handles = list(_watch(self, loss_module, model))

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()

    def flush(self) -> None:
        """The step's microbatches are over: hand on the last one's events."""
        if self._events:
            self._sink(self._events)
        self._events = []

    def forget(self) -> None:
        """The step is over: its gradients are no longer needed."""
        self.own, self.last = {}, {}

    def begin(self, batch: Batch) -> None:
        """A microbatch enters the loss module."""
        self.flush()
        self.step, self._calls, self._rows = batch.step, {}, len(batch.sample_ids)
        ids = torch.stack([batch.rows, batch.sample_ids]).T.double()
        self.note(BATCH, "rows and sample ids", ids.tolist())
        for name, tensor in (("inputs", batch.inputs), ("targets", batch.targets), ("valid", batch.valid)):
            self.note(BATCH, name, fingerprint(tensor, self._rows))

    def note(self, kind: str, name: str, values: list[list[float]], call: int | None = None) -> int:
        """Record one event; returns its call number."""
        if call is None:
            call = self._calls.get((kind, name), 0)
            self._calls[kind, name] = call + 1
        self._events.append(Event(kind, name, call, values))
        return call

    def computed(self, name: str, output: object) -> None:
        """A module returned: note each tensor of its output, and its gradient when backward comes to it."""
        for tensor in _tensors(output):
            call = self.note(FORWARD, name, fingerprint(tensor, self._rows))
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient(name, call))  # type: ignore[no-untyped-call]

    def weighed(self, loss_sum: Tensor, count: Tensor) -> None:
        """The loss of the microbatch: its pair, and later the weight that backward gives it."""
        self.note(LOSS, "sum over valid targets", [[float(loss_sum.detach())]])
        self.note(LOSS, "count of valid targets", [[float(count)]])
        if loss_sum.requires_grad:
            loss_sum.register_hook(self._on_weight)  # type: ignore[no-untyped-call]

    def own_gradient(self, name: str) -> Callable[[Tensor], None]:
        """A hook for a parameter: sees its gradient of one microbatch, summed over all its uses, not yet reduced."""

        def hook(gradient: Tensor) -> None:
            self.note(GRADIENT, name, fingerprint(gradient / self._weight))
            self.last[name] = gradient.detach().clone()
            self.own[name] = self.own[name] + gradient.detach() if name in self.own else self.last[name]

        return hook

    def _on_weight(self, gradient: Tensor) -> None:
        self._weight = float(gradient)
        self.note(WEIGHT, "the loss", [[self._weight]])

    def _on_gradient(self, name: str, call: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.note(BACKWARD, name, fingerprint(gradient / self._weight, self._rows), call)

        return hook


def _watch(tracer: Tracer, loss_module: nn.Module, model: nn.Module) -> Iterator[Any]:
    """Hooks on the loss module, every module of the model under its bare name, and every parameter once."""

    def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        tracer.begin(inputs[0])

    def leave(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        tracer.weighed(*output)

    yield loss_module.register_forward_pre_hook(enter)
    yield loss_module.register_forward_hook(leave)
    for name, module in model.named_modules():
        label = name or "(the model)"
        yield module.register_forward_hook(lambda _m, _i, output, label=label: tracer.computed(label, output))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_hook(tracer.own_gradient(name))  # type: ignore[no-untyped-call]


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
def tracing(loss_module: nn.Module, model: nn.Module, lines: JsonLines) -> Iterator[Tracer]:
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

    tracer = Tracer(loss_module, model, sink)
    try:
        yield tracer
    finally:
        tracer.flush()
        tracer.close()
