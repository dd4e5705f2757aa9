"""What a rank holds of each tensor, held against the same part of the reference; nothing is gathered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.models.boxes import box_of
from fourfold.parallel.clip import local
from fourfold.spec.boxes import Box
from fourfold.train.setup import Training
from fourfold.verify.measure import SMALLEST_SHARE, relative_gap
from fourfold.verify.reference import Reference


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's values of a tensor, sharing its memory, and which box of the whole they are."""

    values: NDArray[np.float64]
    box: Box

    @classmethod
    def whole(cls, values: NDArray[np.float64]) -> Part:
        """All of a tensor."""
        return cls(values, Box((0,) * values.ndim, values.shape))

    def gap(
        self, whole: NDArray[np.float64], size: float, largest_of_kind: float, factor: float = 1.0
    ) -> float:
        """To `factor` times the same box of `whole`; inf where the shapes cannot be.

        size: the largest magnitude in `whole`, by which a box is judged: a cut must not make the measure finer.
        """
        if len(self.box.size) != whole.ndim or not math.isfinite(size):
            return math.inf
        expected = whole[self.box.slices] * factor
        return relative_gap(self.values, expected, max(size / SMALLEST_SHARE, largest_of_kind) * abs(factor))


def part_of(tensor: Tensor) -> Part:
    """What this rank holds of `tensor`; a plain one is whole."""
    values = local(tensor).cpu().numpy()
    return Part(values, box_of(tensor)) if isinstance(tensor, DTensor) else Part.whole(values)


def parameters(training: Training) -> dict[str, Part]:
    """By the bare model's names."""
    return {name: part_of(parameter) for name, parameter in training.named_parameters().items()}


def gradients(training: Training) -> dict[str, Part]:
    """Of the parameters that have one."""
    held = training.named_parameters().items()
    return {name: part_of(p.grad) for name, p in held if p.grad is not None}


def gradient_gaps(
    training: Training, reference: Reference, step: int, factor: float = 1.0
) -> dict[str, float]:
    """Gap of each gradient to `factor` times the reference's, of what this rank has of the model.

    inf where only one of them exists, and where it is not cut as its parameter is.
    """
    held, expected = gradients(training), reference.gradients(step)
    cut = {name: part.box for name, part in parameters(training).items()}
    sizes, largest = reference.steps[step].sizes, reference.steps[step].largest_gradient
    return {
        name: held[name].gap(expected[name], sizes[name], largest, factor)
        if name in held and name in expected and held[name].box == cut[name]
        else math.inf
        for name in reference.names
        if name in cut and (name in held or name in expected)
    }


def parameter_gaps(training: Training, reference: Reference, step: int) -> dict[str, float]:
    """Gap of each parameter to the reference's after `step`."""
    held, expected = parameters(training), reference.parameters(step)
    sizes, largest = reference.parameter_sizes(step), reference.largest_parameter
    return {
        name: held[name].gap(expected[name], sizes[name], largest)
        if name in held and name in expected
        else math.inf
        for name in (held if training.parallel.pipeline is not None else held.keys() | expected.keys())
    }


def uncovered(shapes: Mapping[str, Sequence[int]], by_rank: Iterable[Mapping[str, Box]]) -> dict[str, int]:
    """Elements of each tensor that lie in no rank's box; tensors without any are left out."""
    ranks = list(by_rank)
    left = {
        name: missing(shape, {ranked[name] for ranked in ranks if name in ranked})
        for name, shape in shapes.items()
    }
    return {name: count for name, count in left.items() if count}


def missing(shape: Sequence[int], boxes: Iterable[Box]) -> int:
    """Elements of a tensor of `shape` outside all `boxes`: by the cells between the boxes' own edges."""
    held = [box for box in boxes if box.elements]
    edges = [
        sorted(
            {0, length}
            | {edge for box in held for edge in (box.offset[dim], box.offset[dim] + box.size[dim])}
        )
        for dim, length in enumerate(shape)
    ]
    count = 0
    for cell in product(*(pairwise(along) for along in edges)):
        inside = any(
            all(
                box.offset[dim] <= start and stop <= box.offset[dim] + box.size[dim]
                for dim, (start, stop) in enumerate(cell)
            )
            for box in held
        )
        if not inside:
            count += math.prod(stop - start for start, stop in cell)
    return count
