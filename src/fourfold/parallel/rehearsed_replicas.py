"""Torch's DDP where a step is only rehearsed: its C++ reducer reads values, which are not there.

The same buckets, made by torch's own function: first of all parameters (or, where some may be unused, by size), after
the first backward anew in the order in which gradients were ready, and all of them allocated from the beginning. What
`tests/parallel/test_rehearsed_replicas.py` holds it to is a real run's collectives and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size
from torch.nn import Parameter

from fourfold.collectives.rehearsed import has_values
from fourfold.collectives.tree import all_reduce
from fourfold.models.protocol import LossModule
from fourfold.parallel.data_parallel import Replicas
from fourfold.parallel.leaves import Leaves, Turns
from fourfold.parallel.took_part import unused
from fourfold.spec.errors import CheckFailed
from fourfold.spec.training import LayoutSpec, PrecisionSpec


def replicas(
    module: LossModule,
    layout: LayoutSpec,
    device: torch.device,
    precision: PrecisionSpec,
    leaves: Leaves | None = None,
) -> Replicas:
    """`module` under torch's DDP, or, where its parameters have no values, as that would spread it."""
    if all(has_values(parameter) for parameter in module.parameters()):
        return Replicas(module, layout, device, precision, leaves)
    return RehearsedReplicas(module, layout, precision, leaves)


class RehearsedReplicas(Replicas):
    """What DDP asks for and holds, step by step, without its values."""

    def __init__(
        self, module: LossModule, layout: LayoutSpec, precision: PrecisionSpec, leaves: Leaves | None = None
    ) -> None:
        self._network: nn.Module = module
        self._turns = None if leaves is None else Turns(module, leaves)
        self._precision = precision
        self._may_be_unused = layout.unused_parameters
        self._cap = int(layout.bucket_mib * 2**20)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._syncs = False
        self._ready: list[Parameter] = []  # in this backward, in order
        self._settled = self._may_be_unused  # then torch keeps its first buckets
        self._fill(self._trained, self._cap if self._may_be_unused else 2**62)
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @property
    def module(self) -> nn.Module:
        """See `Replicas`."""
        return self._network

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """See `Replicas.microbatch`."""
        if self._ready and not self._settled:
            self._fill(self._ready, self._cap)
            self._settled = True
        self._syncs, self._ready = last, []
        self._missing = [len(bucket) for bucket in self._buckets]
        with nullcontext() if self._turns is None else self._turns.microbatch():
            yield

    def finish(self) -> None:
        """See `Replicas.finish`. Collectives: what a real one has at its end, where parameters may be unused."""
        if self._may_be_unused:
            dist.all_reduce(torch.empty(len(self._trained), dtype=torch.int32))
        elif any(self._missing):
            names = {id(p): name for name, p in self._network.named_parameters()}
            took = {id(p) for p in self._ready}
            raise CheckFailed(unused([names[id(p)] for p in self._trained if id(p) not in took]))

    def empty_bucket_bytes(self) -> int:
        """See `Replicas.empty_bucket_bytes`."""
        views = {p.grad.untyped_storage()._cdata for p in self._trained if p.grad is not None}
        return sum(flat.nbytes for flat in self._flat if flat.untyped_storage()._cdata not in views)

    def _fill(self, parameters: Sequence[Parameter], cap: int) -> None:
        """New buckets for `parameters`, in their order; of the ones before nothing is left."""
        self._views: dict[int, Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        self._flat: list[Tensor] = []
        indices, _ = _compute_bucket_assignment_by_size(list(parameters), [cap])
        self._buckets = [[parameters[index] for index in bucket] for bucket in indices]
        for number, bucket in enumerate(self._buckets):
            flat = bucket[0].new_empty(sum(p.numel() for p in bucket))
            start = 0
            for parameter in bucket:
                self._views[id(parameter)] = flat[start : start + parameter.numel()].view(parameter.shape)
                self._bucket_of[id(parameter)] = number
                start += math.prod(parameter.shape)
            self._flat.append(flat)

    @torch.no_grad()
    def _take(self, parameter: Parameter) -> None:
        """A gradient is ready: into its bucket, and a bucket that is full into the sum."""
        self._ready.append(parameter)
        if not self._syncs:
            return
        assert parameter.grad is not None, "it is ready"
        view, number = self._views[id(parameter)], self._bucket_of[id(parameter)]
        view.copy_(parameter.grad)
        parameter.grad = view
        self._missing[number] -= 1
        if not self._missing[number]:
            self._reduce(self._flat[number])

    def _reduce(self, flat: Tensor) -> None:
        if self._turns is not None:
            all_reduce(flat, None)
            return
        narrow = self._precision.reduce == "bf16"
        dist.all_reduce(flat.to(torch.bfloat16) if narrow else flat)
