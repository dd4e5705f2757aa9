"""Blocks that the tests of compilation compile, and what ranks do in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fourfold.models.draws import Draws
from tests.parallel.one_device import DECODER, Seen, compare

AOT = {"compile": "blocks", "compile_backend": "aot_eager"}
MIXTURE = DECODER | {"moe": {"experts": 4, "top_k": 2}}


def compare_counting(
    model: Mapping[str, Any], layout: Mapping[str, Any], more: Mapping[str, Any]
) -> tuple[Seen, int, Sequence[str]]:
    """`one_device.compare`; how many graphs were made, and why some ended within a block."""
    begin_counting()
    seen = compare(model, layout, **more)
    return seen, graphs(), [*counters["graph_break"]]


def begin_counting() -> None:
    """Forget all code."""
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    """How many were made since."""
    return int(counters["stats"]["unique_graphs"])


def for_good(compile: Any) -> Any:
    """torch's compile, whose code is taken again whether it fits or not."""

    def made(forward: Any, **more: Any) -> Any:
        options = {"guard_filter_fn": lambda guards: [False for _ in guards]}
        return compile(forward, options=options, **more)

    return made


class Capped(nn.Module):
    """A block with a number of its own."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.inner, self.cap = nn.Linear(4, 4), cap

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4] -> [B, 4]."""
        return x + self.inner(x).clamp(-self.cap, self.cap)


class Dropping(nn.Module):
    """A block that draws by a name, which code has as a constant."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.name = nn.Linear(4, 4), name

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        """[B, 4] -> [B, 4]."""
        return x + draws.dropout(self.inner(x), 0.5, self.name)


class Counting(nn.Module):
    """A block that names its calls, and computes by that: text is a constant of code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), "0"

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4] -> [B, 4]."""
        self.calls = str(int(self.calls) + 1)
        return x + self.inner(x) * float(self.calls)


class InTurn(nn.Module):
    """Blocks one after the other, and the sum of what comes out."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        """(sum, count)."""
        for block in self.blocks:
            x = block(x, *more)
        return x.square().sum(), torch.tensor(x.numel())
