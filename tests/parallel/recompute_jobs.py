"""Models and steps that the tests of recompute run, here and in ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.models.protocol import ModelKit
from fourfold.parallel.apply import Parallel, parallelize
from fourfold.parallel.clip import local
from fourfold.parallel.narrow import loss_module, narrow_dtype
from fourfold.spec.errors import FourfoldError
from fourfold.spec.training import LayoutSpec, PrecisionSpec
from fourfold.train.live import LiveBytes
from tests.parallel.one_device import CPU, DECODER, SEED, make_kit, part
from tests.parallel.plain_kit import PlainKit

DEEP = DECODER | {"layers": 4, "width": 32, "vocabulary": 16}


def spread(kit: ModelKit, mode: str, precision: PrecisionSpec, **more: Any) -> Parallel:
    """A kit's model on one device. dtype: fp32."""
    layout = LayoutSpec(dp_replicate=1, recompute=mode, unused_parameters=True, **more)
    module = loss_module(kit, kit.build(SEED, torch.float32), precision, False)
    return parallelize(module, layout, CPU, precision)


def gradients(kit: ModelKit, mode: str, batch: Any, **precision: Any) -> dict[str, Tensor]:
    """Of one forward and backward, in the dtypes asked for, after the same seed."""
    asked = PrecisionSpec(**precision)
    parallel = spread(kit, mode, asked)
    torch.manual_seed(7)
    dtype = narrow_dtype(asked)
    with parallel.microbatch(True):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            total, _ = parallel.module(batch)
        total.backward()
    found = {name: p.grad for name, p in parallel.network.named_parameters() if p.grad is not None}
    return found | {"loss": total.detach(), "state": torch.get_rng_state()}


def kept(mode: str) -> tuple[int, int]:
    """Bytes that a forward of a decoder keeps for its backward, and the most alive until that is over."""
    kit = make_kit(DEEP)
    with LiveBytes() as live:
        parallel = spread(kit, mode, PrecisionSpec())
        batch = part(kit, 0, 0, 64, True)
        before = live.now
        live.begin()
        with parallel.microbatch(True):
            total, _ = parallel.module(batch)
            forward = live.now - before
            total.backward()
        return forward, live.most - before


class Odd(nn.Module):
    """A block of which `fault` says what is wrong with it, if anything."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.inner, self.fault, self.calls = nn.Linear(4, 4), fault, 0
        self.norm = nn.BatchNorm1d(4) if fault == "statistics" else nn.Identity()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """[B, 4] -> [B, 4]."""
        self.calls += 1
        x = nn.functional.dropout(self.inner(self.norm(x)), 0.3)  # torch's own random stream
        if self.fault == "counter" and self.calls > 1:
            return x * scale
        if self.fault == "buffer":
            self.seen += 1.0
        if self.fault == "replaced":
            self.seen = self.seen + 1.0
        return torch.tanh(x) * scale


class Odds(nn.Module):
    """Two blocks, of which the second is `fault`."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Odd("none"), Odd(fault)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(a sum, a count)."""
        for one in self.parts:
            x = one(x, scale=x.detach().mean())  # by its name, too
        return x.square().sum(), torch.tensor(1)


def odds(fault: str) -> PlainKit:
    torch.manual_seed(SEED)
    made = Odds(fault)
    return PlainKit(lambda: made, ("parts.0", "parts.1"))


class Batched(tuple):  # type: ignore[type-arg]
    """Inputs as PlainKit takes them apart."""


def refusal(make: Callable[[], ModelKit], mode: str) -> FourfoldError | None:
    """What is raised of a model in its first forward and backward."""
    try:
        parallel = spread(make(), mode, PrecisionSpec())
        with parallel.microbatch(True):
            parallel.module(Batched([torch.ones(3, 4)]))[0].backward()
    except FourfoldError as error:
        return error
    return None


class _Beside(nn.Module):
    """A block whose first column takes what a column before it took, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, 4] -> [B, T, 4]."""
        return self.down(torch.tanh(self.up(x)))


class _Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.first, self.second = _Beside(), _Beside()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(a sum, a count)."""
        x = self.table(tokens)
        made = self.first(x) + self.second(x)
        return made.square().sum(), torch.tensor(1)


class _ForkedKit(PlainKit):
    def sharding(self) -> dict[str, Any]:
        return {"table.weight": "vocabulary", "*.up.weight": "column", "*.down.weight": "row"}


def forked(mode: str) -> dict[str, list[float]]:
    """Gradients of this rank under tensor and sequence parallel, of a block that shares its input with another."""
    torch.manual_seed(SEED)
    kit = _ForkedKit(lambda: _Forked().double(), ("second",))
    layout = LayoutSpec(dp_replicate=1, tp=2, sp=True, recompute=mode)
    module = loss_module(kit, kit.build(SEED, torch.float32), PrecisionSpec(), False)
    parallel = parallelize(module, layout, CPU)
    with parallel.microbatch(True):
        parallel.module(Batched([torch.arange(6).view(1, 6)]))[0].backward()
    parallel.finish()
    return {name: local(p.grad).flatten().tolist() for name, p in parallel.network.named_parameters()}
