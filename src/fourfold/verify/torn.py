"""Rows with document borders and padding in them, wherever the Spec's own have none, by the sample's own hash."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.data.order import key_of, mix
from fourfold.data.sample import Sample, Source

_PADDED = 0.5  # of the samples, this share ends in padding
_LONGEST = 0.5  # share of a row that is padding at most


@dataclass(frozen=True, slots=True)
class TornSource:
    """A source whose every row holds two documents or more, and every other one ends in padding.

    Where the sample itself has one document it is cut in two; the last token of each predicts nothing, as elsewhere.
    """

    source: Source

    @property
    def vocabulary(self) -> int | None:
        return self.source.vocabulary

    def __len__(self) -> int:
        return len(self.source)

    def sample(self, index: int) -> Sample:
        """The sample, torn."""
        return torn(self.source.sample(index), index)

    def largest(self) -> Sample:
        return self.source.largest()

    def counts(self) -> dict[str, int]:
        return self.source.counts()


def torn(sample: Sample, sample_id: int) -> Sample:
    """`sample` (tokens [T]) as rows of two documents or more, maybe padded; others as they are."""
    if sample.documents is None or len(sample.inputs) < 3:
        return sample
    words = mix(np.arange(3, dtype=np.uint64) + np.uint64(3 * sample_id), key_of("adversary", 0))
    padded, where, length = (float(word >> np.uint64(11)) / 2.0**53 for word in words)
    tokens = len(sample.inputs)
    filled = sample.nonpadding
    if padded < _PADDED:
        filled = max(2, min(filled, tokens - 1 - int(length * _LONGEST * (tokens - 1))))
    documents, valid = sample.documents.copy(), sample.valid.copy()
    if documents[0] == documents[filled - 1]:
        cut = 1 + int(where * (filled - 1))
        documents[cut:] += 1
        valid[cut - 1] = False
    inputs, targets = sample.inputs.copy(), sample.targets.copy()
    if filled < tokens:
        inputs[filled:] = 0
        targets[filled - 1 :] = 0
        valid[filled - 1 :] = False
        documents[filled:] = documents[filled - 1] + 1
    return Sample(inputs, targets, valid, documents, min(filled, sample.nonpadding))
