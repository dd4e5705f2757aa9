"""One device for many layouts: a small adversarial model, a batch that every layout cuts, one reference for a depth.

A pipeline needs a block for each stage; every other layout is judged on the fewest blocks that show all, for seconds
count. So layouts of one depth share a case and its reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.spec.data import SyntheticDataSpec
from fourfold.spec.model import DecoderSpec
from fourfold.spec.rules import require
from fourfold.spec.schedules import stages_in_all
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.spec.training import BatchSpec, LayoutSpec
from fourfold.verify.case import Case, clipping, traced_reference
from fourfold.verify.covering import ROWS
from fourfold.verify.equal import prepared
from fourfold.verify.judge import Judge
from fourfold.verify.measure import GATE_EPS
from fourfold.verify.reference import Reference
from fourfold.verify.uneven import sharpened

LAYERS, SEQUENCE = 2, 32  # at most, where no layout of the Spec needs more


@dataclass(slots=True)
class Oracle:
    """The case of one depth but for layout and microbatches, and what one device computes of it."""

    case: Case
    reference: Reference
    _traced: tuple[Reference, Path] | None = None

    def traced(self) -> tuple[Reference, Path]:
        """The reference with everything it computes written down; made when the first layout fails."""
        if self._traced is None:
            self._traced = traced_reference(self.case, self.case.steps, "traced")
        return self._traced


@dataclass(slots=True)
class Oracles:
    """Oracles by depth, made when first asked for. small: as `reduced` made it. shared: takes what all have in common.

    adverse: whether the model is the adversarial one.
    """

    small: Spec
    world: int
    steps: int
    scratch: Path
    shared: Judge
    _by_layers: dict[int | None, Oracle] = field(default_factory=dict)

    @property
    def adverse(self) -> bool:
        return isinstance(self.small.model, DecoderSpec)

    def of(self, layout: LayoutSpec) -> Oracle:
        """The oracle of the depth that `layout` is judged with. Raises SpecError or DataError for the request."""
        layers = depth(self.small, layout)
        if layers not in self._by_layers:
            self._by_layers[layers] = self._made(layers)
        return self._by_layers[layers]

    def _made(self, layers: int | None) -> Oracle:
        """On as many data-parallel ranks as there are, made sharp, and adversarial if it is a decoder."""
        update: dict[str, Any] = {"layout": LayoutSpec()}
        told: list[str] = []
        if isinstance(self.small.model, DecoderSpec) and layers != self.small.model.layers:
            update["model"] = self.small.model.model_copy(update={"layers": layers})
            told = [f"model.layers {self.small.model.layers} -> {layers}, where no pipeline has more stages"]
        settled = settle(self.small.model_copy(update=update), self.world)
        require(settled, "train")
        sharp, more = sharpened(settled)
        case, changes = prepared(sharp, self.world, self.steps, self.adverse, (*told, *more))
        scratch = self.scratch / f"layers-{layers}"
        scratch.mkdir()
        judge = Judge(self.shared.command, list(changes))
        case, reference = clipping(case.at(scratch).with_optimizer(eps=GATE_EPS), judge)
        self._share(judge, case, reference)
        return Oracle(case, reference)

    def _share(self, judge: Judge, case: Case, reference: Reference) -> None:
        self.shared.changes += [change for change in judge.changes if change not in self.shared.changes]
        self.shared.clipping(reference, case.spec.optimizer.clip_norm)
        if not self._by_layers:
            self.shared.sometimes(case.spec, reference)


def reduced(spec: Spec, world: int) -> tuple[Spec, tuple[str, ...]]:
    """The Spec, small, with a batch that every data-parallel degree cuts into whole microbatches; and what changed.

    Its layers are left to `depth`.
    """
    rows = ROWS * world
    changes = [f"batch: {rows} samples, so that every layout has as many microbatches as it is to have"]
    update: dict[str, Any] = {"batch": BatchSpec(global_batch=rows, micro_batch=1)}
    if not isinstance(spec.data, SyntheticDataSpec) and spec.data.sequence > SEQUENCE:
        cut = math.gcd(spec.data.sequence, 2 * world)  # whatever cp and sp cut it by divides this
        length = cut * max(1, SEQUENCE // cut)
        changes.append(f"data.sequence {spec.data.sequence} -> {length}")
        update["data"] = spec.data.model_copy(update={"sequence": length})
    return spec.model_copy(update=update), tuple(changes)


def depth(spec: Spec, layout: LayoutSpec) -> int | None:
    """How many layers a decoder is judged with on `layout`; None for a model of another kind, which is as it is."""
    model = spec.model
    if not isinstance(model, DecoderSpec):
        return None
    if layout.pp > 1 and layout.pp_split is not None:
        return model.layers  # what was asked for is how these are split
    first = model.moe.first_dense_layers + 1 if model.moe is not None else 1
    return min(model.layers, max(LAYERS, first, stages_in_all(layout)))
