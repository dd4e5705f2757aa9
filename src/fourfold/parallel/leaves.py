"""Gradients of a step's microbatches, added up in the order of one tree (`collectives.tree`): exact mode.

A rank computes a run of the step's microbatches, so its own sum is a node of the tree over all of them. It is formed
here, parameter by parameter, as each gradient comes: of A microbatches at most about log2 A sums are held, and the
newest. No gradient in one counts as zeros, as long as there is one in another: ranks that exchange have zeros, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fourfold.collectives.tree import completed
from fourfold.spec.errors import CheckFailed, Problem


class Leaves:
    """The sums that are under way on this rank, by parameter.

    order: for so many microbatches, how many sums each completes.
    """

    def __init__(self, order: Callable[[int], Sequence[int]] = completed) -> None:
        self.order = order
        self._sums: dict[int, list[Tensor | None]] = {}
        self._came: set[int] = set()
        self._completed: Sequence[int] = ()
        self._depths: Sequence[int] = ()  # before each microbatch: how many sums are under way
        self._number = -1

    def begin(self, microbatches: int) -> None:
        """A step of so many microbatches on this rank."""
        self._completed = self.order(microbatches)
        self._depths = [0]
        for count in self._completed:
            self._depths = [*self._depths, self._depths[-1] + 1 - count]
        self._sums.clear()
        self._number = -1

    def next(self) -> None:
        """The next microbatch comes."""
        self._number += 1
        self._came.clear()

    @property
    def last(self) -> bool:
        """Whether the microbatch is the step's last one here."""
        return self._number + 1 == len(self._completed)

    def came(self, key: int) -> bool:
        """Whether the parameter had its turn in this microbatch."""
        return key in self._came

    @torch.no_grad()
    def take(self, key: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a parameter in this microbatch: it is kept, and changed; None: it takes no part.

        Gives the sum over all of the step's microbatches here in the last one, else None.
        Raises CheckFailed for a second gradient in one microbatch.
        """
        if key in self._came:
            raise CheckFailed(_twice())
        self._came.add(key)
        sums = self._sums.setdefault(key, [None] * self._depths[self._number])
        for _ in range(self._completed[self._number]):
            gradient = _added(sums.pop(), gradient)
        if self.last:
            return gradient
        sums.append(gradient)
        return None

    def held(self) -> Iterator[Tensor]:
        """Every sum that is under way."""
        return (each for sums in self._sums.values() for each in sums if each is not None)


class Turns:
    """The turns of parameters that are whole on this rank, outside FSDP2: each when its gradient comes."""

    def __init__(self, module: nn.Module, leaves: Leaves) -> None:
        """To be made before what else looks at gradients when they come (DDP)."""
        self._leaves = leaves
        self._trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, parameter: Parameter) -> None:
        parameter.grad = self._leaves.take(id(parameter), parameter.grad)

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Around forward and backward of a microbatch. In a step's last one, who takes no part waits for its bucket."""
        self._leaves.next()
        yield
        if not self._leaves.last:
            self.settle()

    def settle(self) -> None:
        """The turn of those that took no part."""
        for parameter in self._trained:
            if not self._leaves.came(id(parameter)):
                parameter.grad = self._leaves.take(id(parameter), None)

    def fill(self, parameter: Tensor, gradient: Tensor) -> None:
        """Before `gradient` of a step's last microbatch is sent: zeros if `parameter` takes no part in that."""
        if not self._leaves.came(id(parameter)):
            whole = self._leaves.take(id(parameter), None)
            if whole is not None:
                gradient.copy_(whole)


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        present = one if one is not None else other
        return None if present is None else present.add_(0.0)  # as zeros would do: -0.0 becomes 0.0
    return one.add_(other)


def _twice() -> Problem:
    return Problem(
        asked="one gradient of every parameter in a microbatch, with run.exact = true",
        found="a parameter whose gradient came in two parts",
        why="sums are formed in one fixed order: a block that runs twice in a forward would have two places in it",
        instead="--set run.exact=false or layout.zero=0, or a model that runs each block once",
    )
