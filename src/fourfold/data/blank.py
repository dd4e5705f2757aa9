"""The shapes of a Spec's data without any of it: for a step that is only rehearsed, where the data may not be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.data.pack import row
from fourfold.data.sample import Sample
from fourfold.data.source import Sources, open_sources
from fourfold.spec.data import SyntheticDataSpec
from fourfold.spec.huggingface import vocabulary_of
from fourfold.spec.spec import Spec

_BYTES = (
    256  # tokens of text that is read byte by byte: what a user's own model is given, as far as is known here
)


@dataclass(frozen=True, slots=True)
class BlankSource:
    """`size` samples, all of the one shape that there is, every target valid."""

    form: Sample
    vocabulary: int | None
    size: int

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Sample:  # noqa: ARG002
        """See `data.sample.Source`."""
        return self.form

    def largest(self) -> Sample:
        """See `data.sample.Source`."""
        return self.form

    def counts(self) -> dict[str, int]:
        """See `data.sample.Source`."""
        return {"samples": self.size}


def blank_sources(spec: Spec) -> Sources:
    """Samples as the settled `spec` has them, opening nothing; enough for one step."""
    if isinstance(spec.data, SyntheticDataSpec):
        return open_sources(spec)
    assert spec.batch.global_batch is not None, "the Spec is settled"
    vocabulary = vocabulary_of(spec.model)[1] or _BYTES
    tokens = np.arange(spec.data.sequence + 1, dtype=np.int64) % vocabulary
    form = row([tokens], spec.data.sequence, spec.data.attend_across_documents)
    return Sources(BlankSource(form, vocabulary, spec.batch.global_batch), None, "")
