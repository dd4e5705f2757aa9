"""Data parallel: every rank holds the whole model; gradients are summed over ranks, in buckets, during backward.

Collectives: in the constructor a broadcast of parameters and buffers from rank 0; in each backward that syncs
one all-reduce for each bucket on the data-parallel group, started as soon as the bucket's last gradient is
ready, so that it overlaps with the rest of backward (Li et al., arXiv 2006.15704, section 3.2).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from fourfold.models.protocol import LossModule
from fourfold.parallel.balance import correction_names
from fourfold.parallel.in_order import Buckets, by_buckets
from fourfold.parallel.leaves import Leaves, Turns
from fourfold.parallel.narrow import narrow_all_reduce
from fourfold.parallel.sharded import replaced
from fourfold.parallel.took_part import unused
from fourfold.spec.errors import CheckFailed
from fourfold.spec.training import LayoutSpec, PrecisionSpec


class Alone:
    """One rank sees all samples: there is nothing to reduce."""

    def __init__(self, module: nn.Module, may_be_unused: bool, leaves: Leaves | None = None) -> None:
        self.module = module
        self._may_be_unused = may_be_unused
        self._turns = None if leaves is None else Turns(module, leaves)

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward."""
        if self._turns is None:
            yield
            return
        with self._turns.microbatch():
            yield
        if last:
            self._turns.settle()

    def finish(self) -> None:
        """Every trained parameter took part, as on every layout, or CheckFailed."""
        if self._may_be_unused:
            return
        idle = [n for n, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if idle:
            raise CheckFailed(unused(idle))

    def rest(self) -> None:
        """Nothing was gathered."""


class Replicas:
    """torch's DistributedDataParallel: gradients are *averaged* over ranks after a backward that syncs."""

    def __init__(
        self,
        module: nn.Module,
        layout: LayoutSpec,
        device: torch.device,
        precision: PrecisionSpec,
        leaves: Leaves | None = None,
    ) -> None:
        """Wrap `module`: on `device`, equal on every rank (the census has compared them)."""
        self._turns = None if leaves is None else Turns(module, leaves)
        self._own = [
            (f"{prefix}.{key}".removeprefix("module."), child, key, parameter, parameter.requires_grad)
            for prefix, child in module.named_modules()
            for key, parameter in child.named_parameters(recurse=False)
        ]
        if layout.unused_parameters:
            # It was asked for because some steps leave parameters out; torch warns at the first that does not.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        # What moves alike on all ranks is not rank 0's to broadcast. torch has no public name for it.
        module._ddp_params_and_buffers_to_ignore = correction_names(module)  # type: ignore[assignment]
        self._wrapped = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=layout.bucket_mib,
            find_unused_parameters=layout.unused_parameters,
            gradient_as_bucket_view=True,
        )
        if self._turns is not None:
            self._wrapped.register_comm_hook(Buckets(self._turns), by_buckets)
        elif precision.reduce == "bf16":
            self._wrapped.register_comm_hook(dist.group.WORLD, narrow_all_reduce)

    @property
    def module(self) -> nn.Module:
        """Called like the bare loss module."""
        return self._wrapped

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around forward and backward: gradients are reduced in the last one only.

        Raises CheckFailed where a parameter is not the one that DDP was given, as it was: it would never be reduced.
        """
        strangers = [
            name
            for name, child, key, own, trained in self._own
            if child._parameters.get(key) is not own or own.requires_grad != trained
        ]
        if strangers:
            raise CheckFailed(replaced(strangers))
        with (
            nullcontext() if last else self._wrapped.no_sync(),
            nullcontext() if self._turns is None else self._turns.microbatch(),
        ):
            yield

    def finish(self) -> None:
        """Every gradient was reduced, or CheckFailed."""
        check_reduced(self._wrapped)

    def rest(self) -> None:
        """Nothing was gathered."""

    def empty_bucket_bytes(self) -> int:
        """Bytes of the buckets, which stay all the time, but for those that gradients are views of just now."""
        told = self._wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
        total = sum(int(size) for size in str(sizes).split(",") if size.strip())
        views = {
            p.grad.untyped_storage()._cdata: p.grad.untyped_storage().nbytes()
            for p in self._wrapped.parameters()
            if p.grad is not None and p.grad._is_view()
        }
        return total - sum(views.values())


def moved(module: LossModule, device: torch.device) -> LossModule:
    """`module` with its parameters and buffers on `device`; on the meta device, or there already, as it is."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors) or all(tensor.device == device for tensor in tensors):
        return module
    return module.to(device)


def mixes_rows(module: nn.Module) -> tuple[str, ...]:
    """Submodules that train on statistics of their own microbatch: no layout of them can equal one device."""
    return tuple(
        name
        for name, child in module.named_modules()
        if isinstance(child, _BatchNorm) and child.training  # SyncBatchNorm too: accumulation cuts its rows
    )


def check_reduced(wrapped: DistributedDataParallel) -> None:
    """Refuse gradients of which a bucket was never reduced.

    DDP waits for every parameter of a bucket; one that took no part in backward leaves the whole bucket
    as each rank had it, without an error before the next forward.
    Raises CheckFailed naming the parameters.
    """
    try:
        # torch has no public name for it; the test of this file holds it
        wrapped._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        idle = [n for n, p in wrapped.module.named_parameters() if p.requires_grad and p.grad is None]
        raise CheckFailed(unused(idle)) from error
