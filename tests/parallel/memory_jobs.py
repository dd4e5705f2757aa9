"""What the tests of units, prefetch, offload and bytes run in ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter

from fourfold.models.protocol import LossModule
from fourfold.parallel.apply import parallelize
from fourfold.parallel.bytes import held
from fourfold.parallel.sharded import Sharded
from fourfold.plan.state_bytes import rank_bytes
from fourfold.spec.errors import FourfoldError, SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.spec.training import LayoutSpec
from fourfold.train.optimizer import Optimizer
from fourfold.train.setup import Training, open_training
from fourfold.train.step import accumulate, agree_totals, clip, update
from fourfold.verify.here import joined_here
from tests.parallel import sharded_jobs
from tests.parallel.one_device import ADAMW, CPU, DECODER, Freezing, compare, make_kit, part, spread
from tests.parallel.plain_kit import PlainKit

TINY = (
    "model.layers=3",
    "model.width=32",
    "model.vocabulary=257",
    "data.sequence=16",
    "optimizer.warmup_steps=0",
)
Bytes = Mapping[str, Mapping[str, int]]


def opened(*sets: str) -> Any:
    asked = settle(load_spec("tiny", [*TINY, *sets]).spec, dist.get_world_size())
    return open_training(asked, joined_here())


def one_step(training: Training, step: int) -> None:
    batches = next(training.loader.steps(step, step + 1))
    accumulate(training, batches, agree_totals(training, batches, False))
    clip(training)
    update(training, step)


def measured(*sets: str) -> tuple[Bytes, Bytes]:
    """What this rank holds at each instant, and what was predicted."""
    found: dict[str, Mapping[str, int]] = {}
    with opened(*sets) as training:

        def look(instant: str) -> None:
            found[instant] = held(training.parallel, training.optimizer.tensors)

        training.between = lambda: look("between microbatches")
        look("after init")
        for step in (0, 1):
            one_step(training, step)
        look("after the step")
        predicted = rank_bytes(training.spec, dist.get_rank())
    assert predicted is not None
    return found, predicted  # type: ignore[return-value]


def refusal(layout: dict[str, Any]) -> str:
    """What refuses a decoder of five blocks when it is spread."""
    try:
        spread(make_kit(DECODER | {"layers": 5}), LayoutSpec(**layout), meta=False)
    except SpecError as error:
        return str(error)
    return ""


def gathered_at_blocks(layout: dict[str, Any], layers: int) -> list[tuple[int, ...]]:
    """Which units of blocks are whole, or on their way, when each block begins: in forward, then in backward."""
    kit = make_kit(DECODER | {"layers": layers})
    module, parallel = spread(kit, LayoutSpec(**layout), meta=False)
    assert isinstance(parallel.reductions[0], Sharded)
    blocks = [module.module.get_submodule(name) for name in kit.blocks(module.module)]
    units = list(dict.fromkeys(b._get_fsdp_state() for b in blocks if isinstance(b, FSDPModule)))
    groups = [state._fsdp_param_groups[0] for state in units]
    seen: list[tuple[int, ...]] = []

    def look(*_: Any) -> None:
        seen.append(
            tuple(at for at, g in enumerate(groups) if g.is_unsharded or g._all_gather_result is not None)
        )

    for block in blocks:
        block.register_forward_pre_hook(look)
        block.register_full_backward_pre_hook(look)
    for number in range(2):  # FSDP2 sets itself up in the first one
        seen.clear()
        with parallel.microbatch(last=True):
            loss, _ = parallel.module(part(kit, number, 0, 7, True))
            loss.backward()
        parallel.finish()
    return seen


class Gated(nn.Module):
    """Blocks of two layers, of which a forward uses the second one where asked."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.blocks = nn.ModuleList(_Gate() for _ in range(blocks))

    def forward(self, x: Tensor, used: str, order: str) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        for at in order:
            y = self.blocks[int(at)](y, at in used)
        return y.square().sum(), torch.tensor(x.shape[0])


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3, dtype=torch.float64)
        self.sometimes = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.always(x).sin()
        return x + y + self.sometimes(x) if both else x + y


def gated(used: list[list[str]], order: str, layout: dict[str, Any]) -> dict[str, float | None]:
    """By parameter, the gap of this rank's summed gradient to one device's; None where both have none."""
    model, whole = Gated(3), Gated(3)
    parallel = parallelize(
        LossModule(PlainKit(lambda: Gated(3), ("blocks.0", "blocks.1", "blocks.2")), model),
        LayoutSpec(**layout),
        CPU,
    )
    mine = used[parallel.dp_rank]
    for micro, names in enumerate(mine):
        with parallel.microbatch(last=micro == len(mine) - 1):
            total, _ = parallel.module((sharded_jobs.inputs(parallel.dp_rank, micro), names, order))
            total.backward()
    parallel.finish()
    for rank, micros in enumerate(used):
        for micro, names in enumerate(micros):
            whole(sharded_jobs.inputs(rank, micro), names, order)[0].backward()
    return {name: sharded_jobs._gap(p, whole.get_parameter(name)) for name, p in model.named_parameters()}


def held_after_looking(layout: dict[str, Any]) -> int:
    """Bytes gathered that are left after forwards without a backward."""
    kit = make_kit(DECODER | {"layers": 3})
    module, parallel = spread(kit, LayoutSpec(**layout), meta=False)
    with parallel.observing(), torch.no_grad():
        module(part(kit, 0, 0, 7, True))
        inside = held(parallel, [])["gathered"]
    assert inside or layout["zero"] == 3
    return held(parallel, [])["gathered"]


def compared(layout: dict[str, Any], layers: int, **more: Any) -> float:
    """The worst gap of gradients, norms and parameters to one device."""
    return compare(DECODER | {"layers": layers}, layout, **more).worst


def replaced(layout: dict[str, Any], how: str, when: str) -> str:
    """What is said of a norm's weight after the optimizer was built. when: before the backward, or after it.

    how: replaced by its copy, or by a plain tensor; frozen; thawed.
    """
    kit = Freezing(make_kit(DECODER), ["blocks.1.ffn_norm.weight"] if how == "thawed" else [])
    module, parallel = spread(kit, LayoutSpec(**layout), meta=False)
    network = module.module
    optimizer = Optimizer(dict(network.named_parameters()), ADAMW)
    norm = network.get_submodule("blocks.1.ffn_norm")

    def change() -> None:
        old = norm.weight
        assert isinstance(old, Parameter)
        if how in ("frozen", "thawed"):
            old.requires_grad_(how == "thawed")
        else:
            values = old.detach().clone() if how == "copy" else torch.ones(old.shape, dtype=old.dtype)
            norm.register_parameter("weight", Parameter(values))

    def compute() -> None:
        with parallel.microbatch(last=True):
            loss, _ = parallel.module(part(kit, parallel.dp_rank, 0, 7, True))
            loss.backward()
        parallel.finish()

    try:
        compute()  # FSDP2 sets itself up in its first forward, and takes what is there then
        optimizer.step(dict(network.named_parameters()), 0.1)
        if when == "before":
            change()
        compute()
        if when == "after":
            change()
        optimizer.step(dict(network.named_parameters()), 0.1)
    except FourfoldError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def forward_before(layout: dict[str, Any], rest: bool) -> str:
    """What comes of an optimizer that is built after a forward: a refusal, or how many parameters it trains.

    rest: what was gathered is dropped first, as after an observation.
    """
    kit = make_kit(DECODER)
    module, parallel = spread(kit, LayoutSpec(**layout), meta=False)
    network = module.module
    with torch.no_grad(), parallel.microbatch(last=True):
        parallel.module(part(kit, 0, 0, 7, True))
    if rest:
        parallel.reductions[0].rest()
    optimizer = Optimizer(dict(network.named_parameters()), ADAMW)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    with parallel.microbatch(last=True):
        loss, _ = parallel.module(part(kit, parallel.dp_rank, 0, 7, True))
        loss.backward()
    parallel.finish()
    try:
        optimizer.step(dict(network.named_parameters()), 0.1)
    except FourfoldError as error:
        return f"{type(error).__name__}: {error}"
    moved = [name for name, p in network.named_parameters() if not _same(p, before[name])]
    return f"{len(moved)} of {len(list(network.parameters()))} moved"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (one.detach(), other)]
    return torch.equal(*whole)


def mapped_files(*sets: str) -> list[str]:
    """Names of the files that this process has mapped with moments, as the system tells them."""
    with opened(*sets) as training:
        one_step(training, 0)
        text = Path(f"/proc/{os.getpid()}/maps").read_text()
    return sorted({line.split(maxsplit=5)[5] for line in text.splitlines() if "moments-rank" in line})
