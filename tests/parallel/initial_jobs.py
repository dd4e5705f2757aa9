"""What the tests of initial values run in ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fourfold.models import draws
from fourfold.models.boxes import box_of
from fourfold.models.protocol import LossModule
from fourfold.parallel.apply import parallelize
from fourfold.parallel.clip import local
from fourfold.parallel.initial import fill_boxes
from fourfold.spec.training import LayoutSpec
from tests.parallel.one_device import CPU, DECODER, SEED, boxed, changed, make_kit, spread


def same_bits(model: dict[str, Any], layout: dict[str, Any], dtype: torch.dtype) -> list[str]:
    """Parameters that this rank made in boxes and that are not those of the whole build, in bits, dtype or tie."""
    kit: Any = make_kit(model)
    whole = kit.build(SEED, dtype)
    module = LossModule(kit, kit.skeleton(dtype))
    parallelize(module, LayoutSpec(**layout), CPU)
    fill_boxes(module, kit, SEED, CPU)
    found = dict(module.module.named_parameters())
    wrong = [f"names: {found.keys() ^ dict(whole.named_parameters()).keys()}"]
    wrong = [] if found.keys() == dict(whole.named_parameters()).keys() else wrong
    for name, parameter in found.items():
        expected = boxed(whole.get_parameter(name).detach(), parameter)
        if parameter.dtype != dtype or not torch.equal(local(parameter), expected):
            wrong.append(name)
    return wrong


def allocated(model: dict[str, Any], layout: dict[str, Any]) -> tuple[int, int, int, int]:
    """Bytes of this rank's boxes, of the storages behind them, of the whole, and the largest that was made at once."""
    largest = 0
    make = draws.normal

    def watched(seed: int, name: str, shape: Any, *more: Any) -> torch.Tensor:
        nonlocal largest
        values = make(seed, name, shape, *more)
        largest = max(largest, values.numel())
        return values

    from fourfold.models import initial

    with changed(initial, "normal", watched):
        module, _ = spread(make_kit(model), LayoutSpec(**layout), meta=True)
    parameters = list(module.module.parameters())
    boxes = sum(box_of(p).elements * p.element_size() for p in parameters if isinstance(p, DTensor))
    storages = {
        local(p).untyped_storage().data_ptr(): local(p).untyped_storage().nbytes() for p in parameters
    }
    whole = sum(p.numel() * p.element_size() for p in parameters)
    return boxes, sum(storages.values()), whole, largest


def built_whole_and_in_boxes(model: dict[str, Any], layout: dict[str, Any]) -> bool:
    """Whether a model that is built whole and then cut has the values of the one that is made in boxes."""
    cut = dict(spread(make_kit(model), LayoutSpec(**layout), meta=False)[0].module.named_parameters())
    boxes = dict(spread(make_kit(model), LayoutSpec(**layout), meta=True)[0].module.named_parameters())
    return cut.keys() == boxes.keys() and all(
        torch.equal(local(p), local(boxes[name])) and p.placements == boxes[name].placements
        for name, p in cut.items()
    )


def plain_parameters() -> bool:
    """Of a tied decoder on the meta device, filled where it is no DTensor: as it is built."""
    kit: Any = make_kit(DECODER)
    module = LossModule(kit, kit.skeleton(torch.float64))
    fill_boxes(module, kit, SEED, CPU)
    built = dict(kit.build(SEED, torch.float64).named_parameters())
    filled = dict(module.module.named_parameters())
    tied = module.module.head.weight is module.module.embedding.weight
    return (
        bool(tied) and built.keys() == filled.keys() and all(torch.equal(built[n], filled[n]) for n in built)
    )
