"""Networks of which parts take no part in some microbatches, and what else the tests of sharding run in ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fourfold.models.protocol import LossModule
from fourfold.parallel.apply import parallelize
from fourfold.parallel.clip import local
from fourfold.spec.errors import CheckFailed
from fourfold.spec.training import LayoutSpec, OptimizerSpec
from fourfold.train.optimizer import Optimizer
from tests.parallel.one_device import CPU, DECODER, boxed, make_kit, part, spread
from tests.parallel.plain_kit import PlainKit

Used = list[list[str]]  # by rank, then microbatch: which layers take part besides the first


class Branching(nn.Module):
    """Layers of which a forward uses those that are named; the last shares its weight with the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.a = nn.Linear(3, 3, dtype=torch.float64)
        self.b = nn.Linear(3, 3, dtype=torch.float64)
        self.frozen = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
        self.tied = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor, used: str) -> tuple[Tensor, Tensor]:
        y = self.frozen(self.first(x))
        for name in used:
            y = y + self.get_submodule(name)(x)
        return self.tied(y).square().sum(), torch.tensor(x.shape[0])


def inputs(rank: int, micro: int) -> Tensor:
    return torch.arange(6, dtype=torch.float64).view(2, 3).sin() + rank - 0.3 * micro


def branches(used: Used, layout: dict[str, Any]) -> dict[str, float | None]:
    """By parameter, this rank's gap of the summed gradient to one device's; None where both have none."""
    model, whole = Branching(), Branching()
    parallel = parallelize(LossModule(PlainKit(Branching, ("a", "b")), model), LayoutSpec(**layout), CPU)
    mine = used[parallel.dp_rank]
    for micro, names in enumerate(mine):
        with parallel.microbatch(last=micro == len(mine) - 1):
            total, _ = parallel.module((inputs(parallel.dp_rank, micro), names))
            total.backward()
    parallel.finish()
    for rank, micros in enumerate(used):
        for micro, names in enumerate(micros):
            whole(inputs(rank, micro), names)[0].backward()
    return {name: _gap(p, whole.get_parameter(name)) for name, p in model.named_parameters()}


def _gap(parameter: nn.Parameter, like: nn.Parameter) -> float | None:
    if parameter.grad is None or like.grad is None:
        return None if parameter.grad is like.grad else float("inf")
    expected = boxed(like.grad, parameter)
    return float((local(parameter.grad) - expected).abs().max()) if expected.numel() else 0.0


def left_out(names: str, layout: dict[str, Any], evaluating: bool) -> None:
    """One forward, in which rank 1 leaves out a block that the others run."""
    parallel = parallelize(
        LossModule(PlainKit(Branching, ("a", "b")), Branching()), LayoutSpec(**layout), CPU
    )
    mine = names if dist.get_rank() == 1 else "ab"
    with torch.set_grad_enabled(not evaluating), parallel.microbatch(last=True):
        total, _ = parallel.module((inputs(dist.get_rank(), 0), mine))
        if not evaluating:
            total.backward()


def refusals(used: Used, layout: dict[str, Any]) -> list[str]:
    """The texts of CheckFailed on this rank in two steps, the second of which uses everything."""
    parallel = parallelize(
        LossModule(PlainKit(Branching, ("a", "b")), Branching()), LayoutSpec(**layout), CPU
    )
    told = []
    for names in (used[dist.get_rank()][0], "ab"):
        with parallel.microbatch(last=True):
            total, _ = parallel.module((inputs(dist.get_rank(), 0), names))
            total.backward()
        try:
            parallel.finish()
        except CheckFailed as error:
            told.append(str(error))
        else:
            told.append("")
    return told


def gathered(layout: dict[str, Any]) -> list[int]:
    """How many units hold whole parameters: at first, after each of two microbatches, and after an evaluation."""
    kit = make_kit(DECODER | {"dropout": 0.0})
    module, parallel = spread(kit, LayoutSpec(**layout), meta=True)
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    seen = [sum(_is_gathered(unit) for unit in units)]
    for micro in range(2):
        with parallel.microbatch(last=micro == 1):
            loss, _ = parallel.module(part(kit, parallel.dp_rank, 0, 7, True))
            loss.backward()
        seen.append(sum(_is_gathered(unit) for unit in units))
    parallel.finish()
    with parallel.observing(), torch.no_grad():
        parallel.module(part(kit, parallel.dp_rank, 0, 7, True))
    return [*seen, sum(_is_gathered(unit) for unit in units)]


def _is_gathered(unit: FSDPModule) -> bool:
    """Whether the modules of a unit hold whole parameters now."""
    own = [p for m in unit.modules() for p in m.parameters(recurse=False)]  # type: ignore[attr-defined]
    return any(not isinstance(p, DTensor) for p in own)


def moves_after(layout: dict[str, Any]) -> bool:
    """Whether a parameter that a forward was run over before its optimizer was built is trained all the same."""
    kit = make_kit(DECODER | {"dropout": 0.0})
    module, parallel = spread(kit, LayoutSpec(**layout), meta=True)
    batch = part(kit, parallel.dp_rank, 0, 7, True)
    with parallel.observing(), torch.no_grad():
        before, _ = parallel.module(batch)
    network = module.module
    optimizer = Optimizer(dict(network.named_parameters()), OptimizerSpec(lr=1e-2, warmup_steps=0))
    with parallel.microbatch(last=True):
        parallel.module(batch)[0].backward()
    parallel.finish()
    optimizer.step(dict(network.named_parameters()), 1e-2)
    with parallel.observing(), torch.no_grad():
        after, _ = parallel.module(batch)
    return float(after) < float(before)
