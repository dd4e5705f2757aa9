"""Sums of gradients over data-parallel ranks in the order of one tree (`collectives.tree`), by torch's own engines."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from fourfold.collectives.tree import Exchanged, Gathering, all_reduce, reduce_scatter
from fourfold.parallel.leaves import Turns


class Buckets:
    """What torch's DDP hands over in a backward, bucket by bucket: exchanged, summed and gathered.

    While a bucket is exchanged the one before it is summed. Collectives come in the same order on every rank: the
    exchange of a bucket, then the gathering of the one before.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._exchanged: tuple[Exchanged, Any] | None = None
        self._gathering: list[tuple[Gathering, Any]] = []

    def take(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin to sum a bucket; with the last one all are finished."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._turns.fill(parameter, gradient)
        buffer = bucket.buffer()
        devices = [buffer.device] if buffer.is_cuda else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        exchanged = Exchanged.begin(buffer, None)
        self._gather()
        self._exchanged = exchanged, future
        if bucket.is_last():
            self._gather()
            for gathering, waiting in self._gathering:
                waiting.set_result(gathering.finish())
            self._gathering.clear()
        return future

    def _gather(self) -> None:
        if self._exchanged is not None:
            exchanged, future = self._exchanged
            self._gathering.append((exchanged.gather(), future))
            self._exchanged = None


def by_buckets(buckets, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
    """A hook of torch's DDP: the sum of a bucket over all ranks."""
    return buckets.take(bucket)


class ReduceScatterInOrder(DefaultReduceScatter):
    """FSDP2's reduce-scatter, and the sum over replicas of what it gives, if there are any."""

    def __init__(self, replicas: dist.ProcessGroup | None = None) -> None:
        self._replicas = replicas

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> Any:
        reduce_scatter(output_tensor, input_tensor, group)
        if self._replicas is not None:
            all_reduce(output_tensor, self._replicas)
