"""Which documents of a corpus are trained on, and which are held out for validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.data.corpus import Corpus
from fourfold.data.order import key_of, mix
from fourfold.spec.errors import DataError, Problem

Name = Literal["all", "train", "validation"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some documents of a corpus, in its order, read as one stream of tokens.

    starts  int64 [D]: where in `corpus.tokens` each begins
    bounds  int64 [D + 1]: where in the stream each begins, and the stream's end
    """

    corpus: Corpus
    name: Name
    fraction: float
    starts: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def __reduce__(self) -> tuple[Callable[..., Part], tuple[Any, ...]]:
        return part_of, (self.corpus, self.name, self.fraction)

    @property
    def tokens(self) -> int:
        return int(self.bounds[-1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, its end mark included: int64 [D]."""
        return np.diff(self.bounds)


def held_out(documents: int, fraction: float) -> NDArray[np.bool_]:
    """Which documents are drawn for validation: bool [documents].

    Each by a hash of its own number: neither seed nor layout nor any other document has a say, so that runs with
    other seeds are validated on the same text, and added documents move none of the old.
    """
    return mix(np.arange(documents, dtype=np.uint64), key_of("validation")) < np.uint64(
        int(fraction * 2.0**64)
    )


def split(corpus: Corpus, fraction: float) -> tuple[Part, Part | None, tuple[str, ...]]:
    """The training part, the validation part (None at fraction 0), and notes on what is unusual about them.

    Where too few documents are there for any to be drawn, the end of the longest is held out, and a note says so.
    Raises DataError where either part would have nothing to predict.
    """
    if fraction == 0.0:
        return part_of(corpus, "all", fraction), None, ()
    train, validation = part_of(corpus, "train", fraction), part_of(corpus, "validation", fraction)
    for part in (train, validation):
        if _targets(part.lengths) < 1:
            raise DataError(_nothing_left(corpus, part))
    asked, share = f"data.validation_fraction = {fraction:g}", validation.tokens / len(corpus.tokens)
    if not _draws_text(corpus, fraction):
        note = (
            f"validation: none of {len(corpus)} documents was drawn at {asked}; the last {validation.tokens} tokens "
            "of the longest are held out instead"
        )
    elif not fraction / 2 <= share <= fraction * 2:
        note = (
            f"validation: the {len(validation)} of {len(corpus)} documents that were drawn at {asked} hold "
            f"{share:.1%} of the tokens, as documents are few or of very different lengths"
        )
    else:
        return train, validation, ()
    return train, validation, (note,)


def part_of(corpus: Corpus, name: Name, fraction: float) -> Part:
    """One part of the corpus; 16 bytes of memory per document, none for "all"."""
    starts, lengths = corpus.offsets[:-1], np.diff(corpus.offsets)
    if name == "all":
        return Part(corpus, name, fraction, starts, corpus.offsets)
    if _draws_text(corpus, fraction):
        drawn = held_out(len(corpus), fraction)
        chosen = drawn if name == "validation" else ~drawn
        starts, lengths = starts[chosen], lengths[chosen]
    else:
        longest = int(lengths.argmax())
        tail = max(2, int(lengths[longest] * fraction))
        if name == "validation":
            starts, lengths = corpus.offsets[longest + 1 : longest + 2] - tail, np.array([tail])
        else:
            lengths[longest] = max(0, lengths[longest] - tail)
    return Part(corpus, name, fraction, starts, np.concatenate([[0], np.cumsum(lengths)]))


def _draws_text(corpus: Corpus, fraction: float) -> bool:
    drawn = held_out(len(corpus), fraction)
    return _targets(np.diff(corpus.offsets)[drawn]) > 0


def _targets(lengths: NDArray[np.int64]) -> int:
    """Tokens that can be predicted: all but the first of each document."""
    return int(np.maximum(lengths - 1, 0).sum())


def _nothing_left(corpus: Corpus, part: Part) -> Problem:
    return Problem(
        asked=f"data.validation_fraction = {part.fraction:g}",
        found=f"{len(corpus)} documents of {len(corpus.tokens)} tokens, of which the {part.name} part would get "
        f"{part.tokens}",
        why="a part without two tokens of one document has nothing to predict",
        instead="--set data.validation_fraction=0   or   --set data.validation_path=FILE",
    )
