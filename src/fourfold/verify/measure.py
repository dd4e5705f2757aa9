"""How far two values are apart, and how far they may be.

No torch: ranks compare their own tensors (as arrays that share the tensor's memory) with a memory-mapped
reference, so that nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

# In fp64 an honest difference between layouts was measured at 1.4e-15 (worst gradient of a four-layer decoder over
# eleven layouts), the smallest of eleven planted faults at 1e-4. The bounds stand between, near the honest side.
LOSS_TOLERANCE = 1e-12
NORM_TOLERANCE = 1e-12
GRADIENT_TOLERANCE = 1e-12
# AdamW divides by sqrt(v) + eps: where a gradient is tiny the quotient amplifies rounding. With the gate's own eps
# it does not (5e-14 measured); with a training's eps, such as 1e-8, it does (1.3e-11 measured).
GATE_EPS = 1e-5
PARAMETER_TOLERANCE = 1e-12
PARAMETER_TOLERANCE_OWN_EPS = 1e-10
# A tensor whose true value is near zero (the gradient of a key bias without positions is exactly zero) cannot be
# judged by its own size: nothing is judged against less than this share of the largest tensor of its kind.
SMALLEST_SHARE = 1e-3


def relative_gap(actual: ArrayLike, reference: ArrayLike, largest_of_kind: float) -> float:
    """max|actual - reference| / max(max|reference|, 1e-3 × largest_of_kind).

    actual, reference: arrays of one shape, any float or integer dtype; the difference is taken in fp64.
    largest_of_kind: the largest magnitude among all reference tensors of the same kind (gradients, parameters).
    Returns inf if anything is not finite or the shapes differ; 0.0 for empty arrays.
    """
    a = np.asarray(actual, dtype=np.float64)
    r = np.asarray(reference, dtype=np.float64)
    if a.shape != r.shape or not math.isfinite(largest_of_kind):
        return math.inf
    if a.size == 0:
        return 0.0
    # np.max keeps a NaN, which the built-in max() may drop; inf - inf is one, and is meant to be.
    with np.errstate(invalid="ignore", over="ignore"):
        difference = float(np.max(np.abs(a - r)))
        size = float(np.max(np.abs(r)))
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    if difference == 0.0:
        return 0.0
    scale = max(size, SMALLEST_SHARE * largest_of_kind)
    return difference / scale if scale > 0.0 else math.inf


def largest(arrays: Iterable[ArrayLike]) -> float:
    """The largest finite magnitude in all `arrays`; 0.0 if there are none.

    What is not finite is left out: it fails by itself in `relative_gap`, and must not take with it every other
    tensor of its kind, or no first deviation could be told.
    """
    found = 0.0
    for array in arrays:
        magnitudes = np.abs(np.asarray(array, dtype=np.float64))
        found = max(found, float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes))))
    return found


def worst(gaps: Iterable[float]) -> float:
    """The largest gap; inf if any is not finite (a NaN never vanishes); 0.0 if there are none."""
    found = 0.0
    for gap in gaps:
        if not math.isfinite(gap):
            return math.inf
        found = max(found, gap)
    return found


def within(gap: float, tolerance: float) -> bool:
    """Whether a gap passes; a NaN does not."""
    return math.isfinite(gap) and gap <= tolerance
