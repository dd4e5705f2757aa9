"""What the tests of users' own models run in ranks, through the product's own way of opening a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.models.protocol import LossModule
from fourfold.models.registry import kit_for
from fourfold.parallel.apply import parallelize
from fourfold.parallel.clip import local
from fourfold.parallel.initial import fill_boxes
from fourfold.spec.errors import SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec
from fourfold.train import setup
from fourfold.train.setup import open_training
from fourfold.train.step import accumulate, agree_totals
from fourfold.verify.here import joined_here
from tests.parallel.one_device import CPU, SEED, boxed, changed
from tests.train.rank_jobs import line

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.toml"
SMALL = (
    *("model.args.dropout=0.2", "data.sequence=15", "batch.global_batch=4", "batch.micro_batch=2"),
    'precision.compute="fp64"',
)


def _sets(layout: dict[str, Any]) -> list[str]:
    return [f"layout.{key}={str(value).lower()}" for key, value in layout.items()]


class Whole:
    """A kit without its way to be made in parts."""

    def __init__(self, kit: Any) -> None:
        self.build, self.loss, self.sharding, self.blocks = kit.build, kit.loss, kit.sharding, kit.blocks


def trained(layout: dict[str, Any], in_parts: bool) -> tuple[str, float]:
    """How the example was made, and the worst gap of a gradient of its first step to one device's."""
    asked = settle(load_spec(str(EXAMPLE), [*SMALL, *_sets(layout)]).spec, dist.get_world_size())
    ways: list[str] = []

    def kit_of(spec: Spec) -> Any:
        return kit_for(spec) if in_parts else Whole(kit_for(spec))

    def filled(*args: Any) -> None:
        ways.append("boxes")
        fill_boxes(*args)

    with (
        changed(setup, "kit_for", kit_of),
        changed(setup, "fill_boxes", filled),
        open_training(asked, joined_here()) as training,
    ):
        batches = next(training.loader.steps(0, 1))
        _, totals = accumulate(training, batches, agree_totals(training, batches, False))
        whole = training.kit.build(asked.run.seed, torch.float64)
        for batch in batches:
            (training.kit.loss(whole, batch)[0] / totals.count).backward()
        worst = 0.0
        for name, parameter in training.named_parameters().items():
            expected = whole.get_parameter(name).grad
            assert expected is not None and parameter.grad is not None, name
            if training.parallel.degree > 1:
                dist.all_reduce(expected)
            gap = (local(parameter.grad) - boxed(expected, parameter)).abs().max() / expected.abs().max()
            worst = max(worst, float(gap))
        return "".join(ways) or "whole", worst


def keeps_a_buffer(layout: dict[str, Any]) -> bool:
    """Whether a buffer that a skeleton gives a value has it when the model is filled."""
    kit: Any = kit_for(load_spec(str(EXAMPLE), [*SMALL]).spec)
    skeleton = kit.skeleton(torch.float64)
    skeleton.register_buffer("scale", torch.arange(3.0), persistent=False)
    module = LossModule(kit, skeleton)
    parallelize(module, LayoutSpec(**layout), CPU)
    fill_boxes(module, kit, SEED, CPU)
    buffer = module.module.get_buffer("scale")
    return torch.equal(buffer, torch.arange(3.0)) and "scale" not in module.module.state_dict()


def module_alone() -> tuple[str, str]:
    """A plain nn.Module under zero 3, and what refuses it under tp 2."""
    texts = []
    for layout in ("layout.zero=3", "layout.tp=2"):
        asked = settle(load_spec("tiny", line(layout)).spec, dist.get_world_size())
        try:
            with open_training(asked, joined_here()) as training:
                batches = next(training.loader.steps(0, 1))
                accumulate(training, batches, agree_totals(training, batches, False))
                texts.append("trained")
        except SpecError as error:
            texts.append(str(error))
    return texts[0], texts[1]
