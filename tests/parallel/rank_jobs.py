"""What the tests of this room run in ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.models.protocol import LossModule
from fourfold.parallel.apply import parallelize
from fourfold.spec.errors import CheckFailed
from fourfold.spec.training import LayoutSpec
from tests.parallel.one_device import DECODER, make_kit, part, spread
from tests.parallel.plain_kit import PlainKit

CPU = torch.device("cpu")


class Branching(nn.Module):
    """Two layers; `second` is used only where asked. Forward gives (sum, count) as a loss does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, both: bool) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        if both:
            y = y + self.second(x)
        return y.square().sum(), torch.tensor(x.shape[0])


def layout(**settings: object) -> LayoutSpec:
    return LayoutSpec(dp_replicate=dist.get_world_size(), **settings)  # type: ignore[arg-type]


def inputs(rank: int, micro: int = 0) -> Tensor:
    return torch.arange(8, dtype=torch.float64).view(2, 4) + 10 * rank + 100 * micro


def gradients(used: list[list[bool]], unused_parameters: bool = False) -> dict[str, list[float] | None]:
    """Averaged gradients after microbatches; used[rank][micro] says whether `second` took part."""
    rank = dist.get_rank()
    model = Branching()
    parallel = parallelize(
        LossModule(PlainKit(Branching), model), layout(unused_parameters=unused_parameters), CPU
    )
    assert (parallel.degree, parallel.dp_rank) == (dist.get_world_size(), rank)
    for micro, both in enumerate(used[rank]):
        with parallel.microbatch(last=micro == len(used[rank]) - 1):
            total, _ = parallel.module((inputs(rank, micro), both))
            total.backward()
    parallel.finish()
    return {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in model.named_parameters()}


def refusal(used: list[bool]) -> str:
    """The text of CheckFailed on this rank, or "" if there was none. used[rank]."""
    parallel = parallelize(LossModule(PlainKit(Branching), Branching()), layout(), CPU)
    with parallel.microbatch(last=True):
        total, _ = parallel.module((inputs(dist.get_rank()), used[dist.get_rank()]))
        total.backward()
    try:
        parallel.finish()
    except CheckFailed as error:
        return str(error)
    return ""


def spread_alone() -> tuple[int, int, bool]:
    module = LossModule(PlainKit(Branching), Branching())
    parallel = parallelize(module, LayoutSpec(dp_replicate=1), CPU)
    with parallel.microbatch(last=False):
        total, _ = parallel.module((inputs(0), True))
        total.backward()
    parallel.finish()
    return parallel.degree, parallel.dp_rank, parallel.module is module


def becomes(asked: dict[str, Any]) -> dict[str, Any]:
    """What a layout of a decoder becomes on this rank."""
    _, parallel = spread(make_kit(DECODER), LayoutSpec(**asked), meta=False)
    return {
        "machinery": type(parallel.reductions[0]).__name__,
        "factor": parallel.loss_factor,
        "degree": parallel.degree,
        "dp_rank": parallel.dp_rank,
        "counts": parallel.counts,
    }


def still_tied(asked: dict[str, Any]) -> bool:
    """Whether head and embedding are one parameter, after building in boxes and after a step's backward."""
    kit = make_kit(DECODER)
    module, parallel = spread(kit, LayoutSpec(**asked), meta=True)
    with parallel.microbatch(last=True):
        parallel.module(part(kit, parallel.dp_rank, 0, 7, True))[0].backward()
    parallel.finish()
    network: Any = module.module
    return network.head.weight is network.embedding.weight and network.head.weight.grad is not None
