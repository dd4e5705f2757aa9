"""Dtypes where ranks meet the model: how parameters take part in forward, and in what gradients are summed.

`precision.parameters = "compute"` rounds every parameter to the compute dtype before a forward: FSDP2 does so when it
gathers them; where it does not hold the model, `Rounded` does. A gradient reaches its parameter in the parameter's own
dtype, and microbatches are added up in that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.func import functional_call

from fourfold.models.loss import wide
from fourfold.models.protocol import BatchLike, LossModule, ModelKit
from fourfold.spec.training import PrecisionSpec

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_REDUCED_IN = torch.bfloat16  # the one narrow dtype of `precision.reduce`


def narrow_dtype(precision: PrecisionSpec) -> torch.dtype | None:
    """The dtype of matrix products where it is narrower than fp32; None where it is not."""
    return _NARROW.get(precision.compute)


def loss_module(kit: ModelKit, network: nn.Module, precision: PrecisionSpec, held: bool) -> LossModule:
    """The network and its loss in the dtypes of `precision`: what leaves the network is fp32 or wider.

    held: FSDP2 will hold the network, and round its parameters itself.
    """
    network.register_forward_hook(_widened)
    return rounded(LossModule(kit, network), precision, held)


def rounded(module: LossModule, precision: PrecisionSpec, held: bool) -> LossModule:
    """`module`, with its parameters rounded before each forward where `precision` says so, and FSDP2 does not do it."""
    dtype = narrow_dtype(precision) if precision.parameters == "compute" and not held else None
    return module if dtype is None else Rounded(module, dtype)


def stream_dtype(precision: PrecisionSpec) -> torch.dtype:
    """Of what goes from block to block: autocast adds what is narrow to a stream in the dtype of the parameters."""
    narrow = narrow_dtype(precision) if precision.parameters == "compute" else None
    return narrow or (torch.float64 if precision.compute == "fp64" else torch.float32)


class Rounded(LossModule):
    """A network whose parameters take part in each forward rounded to `dtype`, as autograd sees it."""

    def __init__(self, inner: LossModule, dtype: torch.dtype) -> None:
        super().__init__(inner.kit, inner.module)
        self._inner = (inner,)  # in a tuple: no part of this module a second time
        self._dtype = dtype

    def forward(self, batch: BatchLike, *stream: Tensor | None) -> Any:
        """See `LossModule.forward`, and `StageModule.forward`."""
        rounded = {
            f"module.{name}": p.to(self._dtype) if p.is_floating_point() else p
            for name, p in self.module.named_parameters()
        }
        return functional_call(self._inner[0], rounded, (batch, *stream))


def policy(precision: PrecisionSpec) -> MixedPrecisionPolicy:
    """What FSDP2 gathers parameters in; autocast, not FSDP2, sees to the inputs of modules."""
    dtype = narrow_dtype(precision) if precision.parameters == "compute" else None
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=dtype and torch.float32, cast_forward_inputs=False
    )


class NarrowReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter with bf16 on the wire. (Its own `reduce_dtype` would also add up microbatches in bf16.)"""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: ARG002
    ) -> dist.Work:
        received = torch.empty_like(output_tensor, dtype=_REDUCED_IN)
        work = super().__call__(received, input_tensor.to(_REDUCED_IN), group, op)
        output_tensor.copy_(received)
        return work


def narrow_all_reduce(group, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
    """A hook of torch's DDP: the mean of a bucket over `group`, with bf16 on the wire."""
    sent = bucket.buffer().to(_REDUCED_IN)
    work = dist.all_reduce(sent, group=group, async_op=True)

    def widen(done):  # type: ignore[no-untyped-def]
        whole = bucket.buffer()
        return whole.copy_(done.value()[0]).div_(group.size())

    return work.get_future().then(widen)


def _widened(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Logits for a loss in fp32; a model that gives its loss itself gives it as it is, and is held to it."""
    narrow = isinstance(output, Tensor) and output.ndim > 0 and output.is_floating_point()
    return wide(output) if narrow else output
