"""Models of a user's own, with sharding tables right and wrong; what their tests run in ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from fourfold.models.draws import Draws
from fourfold.models.loss import squared_error
from fourfold.models.protocol import BatchLike, Heads, LossModule, ModelKit, Rule
from fourfold.parallel import apply, clip
from fourfold.parallel.apply import parallelize
from fourfold.spec.errors import FourfoldError
from fourfold.spec.model import MlpSpec
from fourfold.spec.training import LayoutSpec
from tests.parallel.one_device import CPU, DECODER, SEED, Seen, changed, compare, make_kit, part, spread

WHOLE: dict[str, Rule] = {"first.*": "replicate", "t.*": "replicate", "out.*": "replicate"}
DOWN: dict[str, Rule] = {"down.weight": "row", "down.bias": "replicate"}
TABLES: dict[str, dict[str, Rule]] = {
    "columns": {"up.*": "column", **DOWN, **WHOLE},
    "replicated": {"*": "replicate"},
    "odd": {"up.*": Heads(6), **DOWN, **WHOLE},
    "impossible": {"up.*": "column", "down.*": "row", **WHOLE},
    "not within": {"up.*": Heads(8), **DOWN, **WHOLE, "t.*": "within heads"},
    "between": {"up.*": Heads(8), "middle.*": "replicate", **DOWN, **WHOLE},
}


class Own(nn.Module):
    """A wide layer between two that are whole; dropout where the wide one is cut, and a norm if asked for."""

    def __init__(self, hidden: int, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.t = nn.LayerNorm(8)
        self.up = nn.Linear(8, hidden)
        self.middle = nn.RMSNorm(hidden // dist.get_world_size()) if norm else None
        self.down = nn.Linear(hidden, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, draws: Draws) -> Tensor:
        x = self.t(self.first(x))
        hidden = F.gelu(self.up(x))
        hidden = self.middle(hidden) if self.middle is not None else draws.dropout(hidden, 0.3, "up")
        y: Tensor = self.out(x + self.down(hidden))
        return y


class OwnKit:
    """`Own` with a table by name."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._spec = MlpSpec(kind="mlp", inputs=5, outputs=3)  # of its batches

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Own(6 if self.table == "odd" else 8, self.table == "between").to(dtype)

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        draws = Draws(batch.seed, batch.step, batch.rows)
        return squared_error(module(batch.inputs, draws), batch.targets, batch.valid)

    def sharding(self) -> dict[str, Rule]:
        return TABLES[self.table]

    def blocks(self, module: nn.Module) -> tuple[str, ...]:  # noqa: ARG002
        return ("up",)


def compare_own(table: str, layout: dict[str, Any]) -> Seen:
    return compare(OwnKit(table), layout)


def refusal(table: str, layout: dict[str, Any]) -> str:
    """What refuses the model when it is spread, or in its first forward."""
    return _refusal(OwnKit(table), layout)


def refusal_of_decoder(change: dict[str, Any], layout: dict[str, Any]) -> str:
    return _refusal(make_kit(DECODER | change), layout)


def _refusal(kit: ModelKit, layout: dict[str, Any]) -> str:
    try:
        parallel = parallelize(LossModule(kit, kit.build(SEED, torch.float64)), LayoutSpec(**layout), CPU)
        with parallel.microbatch(last=True):
            parallel.module(part(kit, 0, 0, 0, False))
    except FourfoldError as error:
        return str(error)
    return ""


def collectives(layout: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """How many collectives of each kind a forward and its backward of a decoder without dropout run on "tp"."""
    kit = make_kit(DECODER | {"dropout": 0.0})
    _, parallel = spread(kit, LayoutSpec(**layout), meta=True)
    batch = part(kit, 0, 0, 8, True)
    with parallel.microbatch(last=True):
        parallel.module(batch)[0].backward()  # in the first, replicated modules look at what they are given
    with parallel.microbatch(last=True):
        with CommDebugMode() as forward:
            loss, _ = parallel.module(batch)
        with CommDebugMode() as backward:
            loss.backward()
    return _counted(forward), _counted(backward)


def _counted(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items()}


def without_the_sum(layout: dict[str, Any]) -> Seen:
    """`compare` where the sum of partial gradients leaves each rank its own part."""

    def own_part(network: nn.Module) -> None:
        for parameter in network.parameters():
            gradient = parameter.grad
            if gradient is not None and gradient.placements[0].is_partial():
                parameter.grad = clip.as_cut(gradient.to_local(), parameter)

    with changed(apply, "sum_partial", own_part):
        return compare(DECODER, layout)


def fails_on_rank_1(layout: dict[str, Any]) -> None:
    kit = make_kit(DECODER)
    module = LossModule(kit, kit.build(SEED, torch.float64))
    parallel = parallelize(module, LayoutSpec(**layout), CPU)

    def fail(_: Tensor) -> None:
        if dist.get_rank() == 1:
            raise ValueError("planted on rank 1")

    with parallel.microbatch(last=True):
        loss, _ = parallel.module(part(kit, 0, 0, 7, True))
        module.module.get_parameter("blocks.0.ffn.down.bias").register_hook(fail)
        loss.backward()
