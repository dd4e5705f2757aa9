"""One sample, and what gives samples.

Letters: T tokens of a sequence, F features of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One row of a batch, as arrays.

    inputs     int64 [T] tokens, or float32 [F] features
    targets    int64 [T] tokens, float32 [F] or int64 [] a class
    valid      bool [T] or []: which targets carry loss
    documents  int32 [T]: document number inside the row, padding with a number of its own; None for vectors
    nonpadding tokens (or vectors: 1) that are not padding
    """

    inputs: Array
    targets: Array
    valid: NDArray[np.bool_]
    documents: NDArray[np.int32] | None
    nonpadding: int


class Source(Protocol):
    """Samples by number. Pickles small: a loader's worker opens the files again."""

    @property
    def vocabulary(self) -> int | None:
        """Tokens lie in 0 … vocabulary - 1; None for vectors."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample:
        """The sample with this number, 0 <= index < len; a function of the number alone."""

    def largest(self) -> Sample:
        """A sample of the largest shape, with every position valid: what costs most memory and time."""

    def counts(self) -> dict[str, int]:
        """What it is made of: "samples", and for text "documents", "tokens" and "longest_document"."""
