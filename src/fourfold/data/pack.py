"""Samples cut from documents: rows of `sequence` inputs and as many targets, each the token that follows.

A row is computed when it is asked for, after one binary search: nothing is stored per sample.
Letters: T tokens of a sequence (inputs), D documents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.data.parts import Part
from fourfold.data.sample import Sample


class TokenSource(ABC):
    """Rows of tokens from one part of a corpus.

    attend_across: documents of a row attend to each other (they get one number). A target is valid, either way,
    only in the document of its input: no document's first token is ever predicted from another document.
    """

    def __init__(self, part: Part, sequence: int, vocabulary: int, attend_across: bool = False) -> None:
        self.part = part
        self.sequence = sequence
        self.vocabulary = vocabulary
        self.attend_across = attend_across

    def __reduce__(self) -> tuple[Callable[..., TokenSource], tuple[Any, ...]]:
        return type(self), (self.part, self.sequence, self.vocabulary, self.attend_across)

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """The row with this number, 0 <= index < len."""

    def largest(self) -> Sample:
        """A full row of one document."""
        tokens = np.arange(self.sequence + 1, dtype=np.int64) % self.vocabulary
        return row([tokens], self.sequence, self.attend_across)

    def counts(self) -> dict[str, int]:
        """Samples, documents, tokens (end marks included) and the longest document."""
        return {
            "samples": len(self),
            "documents": len(self.part),
            "tokens": self.part.tokens,
            "longest_document": int(self.part.lengths.max()),
        }

    def _inside(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"samples are numbered 0 … {len(self) - 1}, not {index}")
        return index


class PackedSource(TokenSource):
    """Documents back to back: sample i is tokens i*T … i*T + T of the stream, so each token is a target once.

    The last row is padded; nothing is dropped.
    """

    def __len__(self) -> int:
        return -(-(self.part.tokens - 1) // self.sequence)

    def sample(self, index: int) -> Sample:
        begin = self._inside(index) * self.sequence
        end = min(begin + self.sequence + 1, self.part.tokens)
        starts, bounds, tokens = self.part.starts, self.part.bounds, self.part.corpus.tokens
        document = int(bounds.searchsorted(begin, side="right")) - 1
        pieces = []
        while begin < end:
            shift = int(starts[document]) - int(bounds[document])
            stop = min(end, int(bounds[document + 1]))
            pieces.append(tokens[begin + shift : stop + shift])
            begin, document = stop, document + 1
        return row(pieces, self.sequence, self.attend_across)


class PaddedSource(TokenSource):
    """Each document its own rows, of which the last is padded; a document of one token has none."""

    def __init__(self, part: Part, sequence: int, vocabulary: int, attend_across: bool = False) -> None:
        super().__init__(part, sequence, vocabulary, attend_across)
        rows = -(-(part.lengths - 1) // sequence)
        self._first = np.concatenate([[0], np.cumsum(rows)])  # the first row of each document: int64 [D + 1]

    def __len__(self) -> int:
        return int(self._first[-1])

    def sample(self, index: int) -> Sample:
        document = int(self._first.searchsorted(self._inside(index), side="right")) - 1
        inside = (index - int(self._first[document])) * self.sequence
        begin = int(self.part.starts[document])
        end = begin + int(self.part.bounds[document + 1]) - int(self.part.bounds[document])
        begin += inside
        piece = self.part.corpus.tokens[begin : min(begin + self.sequence + 1, end)]
        return row([piece], self.sequence, self.attend_across)


def row(pieces: Sequence[NDArray[Any]], sequence: int, attend_across: bool = False) -> Sample:
    """A row from the pieces of consecutive documents, together 1 to sequence + 1 tokens; the rest is padding.

    Documents are numbered from 0 inside the row. Padding has a number of its own, so that under a mask by document
    a padded position still sees itself, and no row of the attention is empty.
    """
    window = np.zeros(sequence + 1, dtype=np.int64)
    numbers = np.zeros(sequence + 1, dtype=np.int32)
    filled = 0
    for number, piece in enumerate(pieces):
        begin, filled = filled, filled + len(piece)
        window[begin:filled] = piece
        numbers[begin:filled] = number
    numbers[filled:] = len(pieces)
    valid = numbers[1:] == numbers[:-1]
    valid[filled:] = False
    documents = numbers[:-1]
    if attend_across:
        documents = (documents == len(pieces)).astype(np.int32)
    return Sample(window[:-1], window[1:], valid, documents, min(filled, sequence))
