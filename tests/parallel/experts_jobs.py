"""What the tests of expert parallel run in ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.models.exchange import Here
from fourfold.models.protocol import LossModule, Start
from fourfold.parallel.apply import parallelize
from fourfold.parallel.expert_parallel import Spread
from fourfold.parallel.mesh import sub_mesh
from fourfold.spec.errors import SpecError
from fourfold.spec.grid import Grid
from fourfold.spec.training import LayoutSpec
from tests.parallel.one_device import CPU, DECODER, SEED, Seen, compare, make_kit, spread


class _Crowding:
    """A kit whose routers all score alike when they start: the first expert is chosen by every token."""

    def __init__(self, kit: Any) -> None:
        self._kit = kit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kit, name)

    def build(self, seed: int, dtype: torch.dtype) -> torch.nn.Module:
        module = self._kit.build(seed, dtype)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.endswith("router"):
                    parameter.zero_()
        return module

    def start(self, name: str) -> Start:
        return Start(0.0, 0.0) if name.endswith("router") else self._kit.start(name)


def compare_crowded(model: Mapping[str, Any], layout: Mapping[str, Any]) -> Seen:
    return compare(_Crowding(make_kit(model)), layout, 2, 1)


def there_and_back() -> bool:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    grid = Grid(dp_shard=ranks, ep=ranks)
    here = Spread(Here(), sub_mesh(grid, "cpu", "ep"))
    for counts in ([3, 0, 1, 4], [0, 0, 0, 0], [0, 0, 5, 2]):
        mine = torch.tensor(counts).roll(rank)
        total = int(mine.sum())
        x = torch.randn(total, 3, dtype=torch.float64).requires_grad_()
        arrived = here.to_experts(x, mine, total)
        labelled = here.to_experts(
            mine.new_tensor(range(4)).repeat_interleave(mine)[:, None].double(), mine, total
        )
        each = [expert + rank * 4 // ranks for expert, n in enumerate(arrived.counts) for _ in range(n)]
        if labelled.x[:, 0].tolist() != each:
            return False
        y = arrived.back(arrived.x * 2)
        y.backward(torch.ones_like(y))
        if not torch.equal(y, x * 2) or not torch.equal(_given(x.grad), torch.full_like(x, 2)):
            return False
    return True


def refusal(experts: int) -> str:
    moe = {"moe": {"experts": experts, "top_k": 1}} if experts else {}
    kit = make_kit(DECODER | moe)
    layout = LayoutSpec(dp_replicate=1, dp_shard=dist.get_world_size(), ep=dist.get_world_size(), zero=1)
    try:
        parallelize(LossModule(kit, kit.build(SEED, torch.float64)), layout, CPU)
    except SpecError as error:
        return str(error)
    return ""


def norm_of_ones(model: Mapping[str, Any], layout: Mapping[str, Any]) -> tuple[float, float]:
    """The norm of gradients of ones, and what it is for so many elements."""
    kit = make_kit(model)
    module, parallel = spread(kit, LayoutSpec(**layout), meta=False)
    parameters = list(module.module.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    elements = sum(parameter.numel() for parameter in parameters)
    return float(parallel.norm(parameters, CPU)), elements**0.5


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
