"""Dynamic loss scaling: in fp16 small gradients vanish, so the loss is multiplied before backward.

Source: Micikevicius et al., arXiv 1710.03740, section 3.2: grow while nothing overflows, skip the update and back off
when something does. The constants are settings (`precision.scale_…`), by default those of torch's GradScaler: 2**16,
doubled after 2000 good steps in a row, halved after an overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.collectives.rehearsed import has_values
from fourfold.collectives.sums import sum_floats
from fourfold.spec.training import PrecisionSpec
from fourfold.spec.value import Value


class ScaleState(Value):
    """What a checkpoint holds: the scale of the next step, and the good steps in a row since it last changed."""

    value: float
    good: int


class Scaled(NamedTuple):
    """What became of a step: the scale of its loss, and whether its update was skipped."""

    scale: float
    skipped: bool


class LossScale:
    """The scale of the loss; 1, and never another, where the Spec computes in anything but fp16.

    value: of the step under way. skips: whether that step's gradients overflowed on any rank, so that it has no update.
    last: what became of the last step.
    """

    def __init__(self, precision: PrecisionSpec) -> None:
        self._asked = precision
        self.dynamic = precision.compute == "fp16"
        self.value = precision.scale_start if self.dynamic else 1.0
        self.good = 0
        self.skips = False
        self.last = Scaled(self.value, False)

    @property
    def backed_off(self) -> float:
        """The scale after an overflow; below 1 there is nothing left to take back."""
        return self.value * self._asked.scale_backoff

    def trials(self) -> tuple[LossScale, ...]:
        """For a step that is only tried, and leaves this scale as it is: two scales that must give the same gradients.

        Low ones, so that hardly anything overflows; one, where nothing is scaled.
        """
        tried = []
        for value in (16.0, 8.0) if self.dynamic else (1.0,):
            trial = LossScale(self._asked)
            trial.value = value
            tried.append(trial)
        return tuple(tried)

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor], factor: float = 1.0) -> None:
        """Divide reduced gradients by the scale, in place, and see whether any is not finite, on any rank.

        factor: what they are multiplied with besides; before backward it would take as much off fp16's range.
        gradients: what this rank holds, all on one device, none a DTensor. Decided by the elements themselves, not by
        their norm: it looks at each once, and misses none that a rank holds alone, or only should hold in common.
        Collectives: one all-reduce of one number over the world, on the CPU; none where nothing is scaled.
        """
        self.skips = False
        if not self.dynamic:
            return
        found = torch.zeros(1)
        if gradients:
            found = found.to(gradients[0].device)
            # What torch's GradScaler calls; the test of this file holds it.
            torch._amp_foreach_non_finite_check_and_unscale_(
                list(gradients), found, torch.full_like(found, factor / self.value)
            )
        found = sum_floats(found)
        self.skips = has_values(found) and bool(found > 0)

    def settle(self) -> None:
        """After the step's update, or in its place: the next step's scale. `last` is then what became of this one."""
        self.last = Scaled(self.value, self.skips)
        if not self.dynamic:
            return
        if self.skips:
            self.value, self.good = self.backed_off, 0
            return
        self.good += 1
        if self.good == self._asked.scale_every:
            self.value, self.good = self.value * self._asked.scale_growth, 0

    def state(self) -> ScaleState | None:
        """Between two steps; None where nothing is scaled."""
        return ScaleState(value=self.value, good=self.good) if self.dynamic else None

    def restore(self, state: ScaleState) -> None:
        """Go on from a saved state."""
        self.value, self.good = state.value, state.good
