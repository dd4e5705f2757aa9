"""The example of a user's own model (`examples/own_model.py`) under tensor parallel; what its tests run in ranks."""

from __future__ import annotations

from typing import Any

import torch
from examples.own_model import WindowKit
from torch.distributed.tensor import DTensor, Replicate

from fourfold.parallel.mesh import sub_mesh
from fourfold.spec.model import DecoderSpec
from fourfold.spec.training import LayoutSpec
from tests.parallel.one_device import CPU, DECODER, Seen, compare, make_kit, spread


class ExampleKit(WindowKit):
    """The example's, small, with the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__(3, 8, 2, 0.2)
        self._spec = DecoderSpec(layers=1, width=8, heads=1, vocabulary=256)


def compare_example(layout: dict[str, Any]) -> Seen:
    return compare(ExampleKit(), layout)


def mixed(kind: str, layout: dict[str, Any]) -> str:
    """What becomes of a plain tensor added to one that is spread, while the model is at work."""
    kit = ExampleKit() if kind == "example" else make_kit(DECODER)
    parallel = spread(kit, LayoutSpec(**layout), meta=False)[1]
    mesh = sub_mesh(parallel.grid, "cpu", "tp")
    stream = DTensor.from_local(torch.ones(2, device=CPU), mesh, [Replicate()], run_check=False)
    with parallel.microbatch(last=True):
        try:
            stream + torch.ones(2)
        except RuntimeError as error:
            return str(error)
    return ""
