"""Sums in one fixed order, a binary tree, whoever computes them: the same bits on 1, 2, 4 or 8 ranks.

The leaves are numbered; a node is the sum of its two halves, the first of which has the odd leaf. Where each of 2^k
ranks holds a run of as many leaves, its own sum is a node, and those of all ranks are summed pair by pair in order of
rank: no sum but the tree's own is formed. Addition commutes, so only what is added to what matters.

Over ranks: each gets one chunk of everybody's tensor (an all-to-all), and sums it; the bytes are those of a
reduce-scatter. With an all-gather after it, it is an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def completed(leaves: int) -> list[int]:
    """For each leaf in order, how many nodes it completes: so often the two newest sums become one."""
    if leaves == 1:
        return [0]
    first = (leaves + 1) // 2
    counts = completed(first) + completed(leaves - first)
    counts[-1] += 1
    return counts


def most_held(leaves: int) -> int:
    """How many sums are held at once while they are added up one by one, the newest leaf among them."""
    return 1 if leaves == 1 else max(most_held((leaves + 1) // 2), 1 + most_held(leaves // 2))


def is_power_of_two(number: int) -> bool:
    """Whether so many ranks can each hold a node."""
    return number > 0 and number & (number - 1) == 0


def sum_in_order(parts: Tensor, out: Tensor) -> Tensor:
    """Sum `parts` [N, ...] over its first dim into `out` [...], as the tree of N leaves has it. `parts` is used up."""
    nodes = list(parts.unbind())
    if len(nodes) == 1:
        return out.copy_(nodes[0])
    middle = (len(nodes) + 1) // 2
    return torch.add(_node(nodes[:middle]), _node(nodes[middle:]), out=out)


def _node(leaves: Sequence[Tensor]) -> Tensor:
    """Their sum, in the first of them."""
    if len(leaves) == 1:
        return leaves[0]
    middle = (len(leaves) + 1) // 2
    return _node(leaves[:middle]).add_(_node(leaves[middle:]))


def reduce_scatter(output: Tensor, source: Tensor, group: dist.ProcessGroup | None) -> None:
    """The sum over the group of this rank's chunk. output: [n], source: [N × n], both flat.

    Collectives: one all-to-all over `group`.
    """
    received = torch.empty_like(source)
    dist.all_to_all_single(received, source, group=group)
    sum_in_order(received.view(-1, output.numel()), output)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum a flat tensor over the group, in place. Collectives: one all-to-all and one all-gather over `group`."""
    gathering = Exchanged.begin(tensor, group).gather()
    gathering.finish()


@dataclass(slots=True)
class Exchanged:
    """An all-reduce of which the first half is under way."""

    _tensor: Tensor
    _received: Tensor
    _work: dist.Work
    _group: dist.ProcessGroup | None

    @classmethod
    def begin(cls, tensor: Tensor, group: dist.ProcessGroup | None) -> Exchanged:
        """Send each rank its chunk of a flat tensor."""
        ranks = dist.get_world_size(group)
        source = tensor
        if rest := -tensor.numel() % ranks:
            source = torch.cat([tensor, tensor.new_zeros(rest)])
        received = torch.empty_like(source)
        work = dist.all_to_all_single(received, source, group=group, async_op=True)
        return cls(tensor, received.view(ranks, -1), work, group)

    def gather(self) -> Gathering:
        """Sum this rank's chunk, and send it to all."""
        self._work.wait()
        chunk = sum_in_order(self._received, self._received.new_empty(self._received.shape[1]))
        padded = self._received.numel()
        whole = self._tensor if padded == self._tensor.numel() else self._received.new_empty(padded)
        work = dist.all_gather_single(whole, chunk, group=self._group, async_op=True)
        return Gathering(self._tensor, whole, chunk, work)


@dataclass(slots=True)
class Gathering:
    """An all-reduce of which the second half is under way."""

    _tensor: Tensor
    _whole: Tensor
    _chunk: Tensor  # it is being sent
    _work: dist.Work

    def finish(self) -> Tensor:
        """Wait for the sum; it is in the tensor that was given."""
        self._work.wait()
        if self._whole is not self._tensor:
            self._tensor.copy_(self._whole[: self._tensor.numel()])
        return self._tensor
