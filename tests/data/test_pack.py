"""Rows of tokens: every token a target once, no document predicted from another, padding apart."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.data.corpus import Corpus, open_text
from fourfold.data.pack import PackedSource, PaddedSource, TokenSource, row
from fourfold.data.parts import part_of, split

texts = st.lists(st.binary(min_size=0, max_size=12).map(lambda b: bytes(x % 255 + 1 for x in b)), min_size=1)


def corpus_of(documents: list[bytes]) -> Corpus:
    tokens = np.frombuffer(b"".join(document + b"\0" for document in documents), dtype=np.uint8)
    offsets = np.cumsum([0, *(len(document) + 1 for document in documents)])
    return Corpus(tokens, offsets, "", 255, (corpus_of, (documents,)))


def source_of(kind: type[TokenSource], documents: list[bytes], sequence: int, **more: Any) -> TokenSource:
    return kind(part_of(corpus_of(documents), "all", 0.0), sequence, 256, **more)


def pairs(source: TokenSource) -> list[tuple[int, int]]:
    """All (input, target) that carry loss, in order."""
    found = []
    for index in range(len(source)):
        sample = source.sample(index)
        found += list(
            zip(sample.inputs[sample.valid].tolist(), sample.targets[sample.valid].tolist(), strict=True)
        )
    return found


def expected_pairs(documents: list[bytes]) -> list[tuple[int, int]]:
    return [pair for document in documents for pair in pairwise(document + b"\0")]


@given(texts, st.integers(1, 9))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("kind", [PackedSource, PaddedSource])
def test_every_token_is_predicted_once_from_the_one_before_it_in_its_document(
    kind: type[TokenSource], documents: list[bytes], sequence: int
) -> None:
    assert pairs(source_of(kind, documents, sequence)) == expected_pairs(documents)


@given(texts, st.integers(1, 9), st.booleans())
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("kind", [PackedSource, PaddedSource])
def test_rows_are_whole_and_padding_stands_apart(
    kind: type[TokenSource], documents: list[bytes], sequence: int, across: bool
) -> None:
    source = source_of(kind, documents, sequence, attend_across=across)
    for index in range(len(source)):
        sample = source.sample(index)
        numbers = sample.documents
        assert numbers is not None
        arrays = (sample.inputs, sample.targets, sample.valid, numbers)
        assert [array.shape for array in arrays] == [(sequence,)] * 4
        assert [array.dtype for array in arrays] == [np.int64, np.int64, np.bool_, np.int32]
        assert numbers[0] == 0
        assert (np.diff(numbers) >= 0).all()
        text, padding = numbers[: sample.nonpadding], numbers[sample.nonpadding :]
        assert not set(text) & set(padding)
        assert not sample.valid[sample.nonpadding :].any()
        if across:
            assert set(text) == {0}


def test_packed_rows_number_documents_and_pad_the_last() -> None:
    source = source_of(PackedSource, [b"ab", b"cdef", b"g"], 4)
    assert len(source) == 3
    first, second, last = (source.sample(index) for index in range(3))
    assert bytes(first.inputs.astype(np.uint8)) == b"ab\0c"
    assert bytes(first.targets.astype(np.uint8)) == b"b\0cd"
    assert first.documents is not None
    assert first.documents.tolist() == [0, 0, 0, 1]
    assert first.valid.tolist() == [True, True, False, True]
    assert bytes(second.inputs.astype(np.uint8)) == b"def\0"
    assert second.valid.tolist() == [True, True, True, False]
    assert second.nonpadding == 4
    assert bytes(last.inputs.astype(np.uint8)) == b"g\0\0\0"
    assert last.valid.tolist() == [True, False, False, False]
    assert last.nonpadding == 2
    assert last.documents is not None
    assert last.documents.tolist() == [0, 0, 1, 1]


def test_padded_rows_begin_with_their_document() -> None:
    source = source_of(PaddedSource, [b"", b"abcdefg", b"h"], 4)
    assert len(source) == 3
    found = [bytes(source.sample(index).inputs.astype(np.uint8)) for index in range(3)]
    assert found == [b"abcd", b"efg\0", b"h\0\0\0"]
    assert [source.sample(index).nonpadding for index in range(3)] == [4, 4, 2]


def test_attending_across_gives_one_number_and_the_same_targets() -> None:
    apart = source_of(PackedSource, [b"ab", b"cd"], 4).sample(0)
    across = source_of(PackedSource, [b"ab", b"cd"], 4, attend_across=True).sample(0)
    assert across.documents is not None
    assert across.documents.tolist() == [0, 0, 0, 0]
    assert (across.valid == apart.valid).all()


def test_a_part_with_gaps_is_one_stream(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_text(f"text number {number} ")
    corpus = open_text(str(tmp_path))
    train, validation, _ = split(corpus, 0.2)
    assert validation is not None
    both = [PackedSource(part, 16, 256) for part in (train, validation)]
    everything = [bytes(corpus.tokens[a:b]) for a, b in zip(corpus.offsets, corpus.offsets[1:], strict=False)]
    found = sorted(pair for source in both for pair in pairs(source))
    assert found == sorted(expected_pairs([document[:-1] for document in everything]))


@pytest.mark.parametrize("kind", [PackedSource, PaddedSource])
def test_the_largest_sample_is_full_and_all_valid(kind: type[TokenSource]) -> None:
    sample = source_of(kind, [b"ab"], 600).largest()
    assert sample.valid.all()
    assert sample.valid.shape == (600,)
    assert sample.nonpadding == 600
    assert sample.documents is not None
    assert not sample.documents.any()
    assert sample.inputs.max() < 256


@pytest.mark.parametrize("kind", [PackedSource, PaddedSource])
def test_samples_outside_are_refused_and_sources_pickle_small(kind: type[TokenSource]) -> None:
    source = source_of(kind, [b"some text"], 4)
    for index in (-1, len(source)):
        with pytest.raises(IndexError, match="numbered 0 … 2"):
            source.sample(index)
    again = pickle.loads(pickle.dumps(source))
    assert pairs(again) == pairs(source)
    assert len(pickle.dumps(source_of(kind, [b"x"] * 2, 4))) < 1000


def test_counts() -> None:
    counts = source_of(PackedSource, [b"ab", b"cdef"], 4).counts()
    assert counts == {"samples": 2, "documents": 2, "tokens": 8, "longest_document": 5}


def test_a_row_may_hold_one_token_or_documents_of_one() -> None:
    alone = row([np.array([7], dtype=np.uint8)], 3)
    assert not alone.valid.any()
    assert alone.nonpadding == 1
    ends = row([np.zeros(1, np.uint8)] * 4, 3)
    assert not ends.valid.any()
    assert ends.documents is not None
    assert ends.documents.tolist() == [0, 1, 2]
