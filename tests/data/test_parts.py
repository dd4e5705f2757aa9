"""The validation documents: drawn by their number alone, and never silently none."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.corpus import Corpus, open_jsonl
from fourfold.data.parts import Part, held_out, split
from fourfold.spec.errors import DataError


def corpus_of(folder: Path, *texts: str) -> Corpus:
    path = folder / "c.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_jsonl(str(path), "text")


def documents(part: Part) -> list[bytes]:
    lengths = part.lengths.tolist()
    return [
        bytes(part.corpus.tokens[start : start + length])
        for start, length in zip(part.starts.tolist(), lengths, strict=True)
    ]


def test_about_the_asked_share_is_drawn() -> None:
    assert held_out(100_000, 0.05).mean() == pytest.approx(0.05, abs=0.003)
    assert not held_out(1000, 0.0).any()
    assert held_out(100_000, np.nextafter(1.0, 0.0)).all()


def test_more_documents_or_a_larger_share_move_none_that_was_drawn() -> None:
    few, many, more = held_out(500, 0.1), held_out(5000, 0.1), held_out(500, 0.3)
    assert (many[:500] == few).all()
    assert (more >= few).all()


def test_parts_hold_every_document_once(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(300)]
    train, validation, notes = split(corpus_of(tmp_path, *texts), 0.1)
    assert validation is not None
    assert notes == ()
    held, kept = documents(validation), documents(train)
    assert sorted(held + kept) == sorted(f"{text}\0".encode() for text in texts)
    assert 10 < len(held) < 60
    assert train.tokens == sum(map(len, kept)) == train.bounds[-1]


def test_no_share_no_part(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, "a", "b")
    train, validation, notes = split(corpus, 0.0)
    assert validation is None
    assert notes == ()
    assert documents(train) == [b"a\0", b"b\0"]


@pytest.mark.parametrize("texts", [("only one document here",), ("ab", "the longest of the two")])
def test_too_few_documents_hold_out_the_end_of_the_longest_and_say_so(
    tmp_path: Path, texts: tuple[str, ...]
) -> None:
    corpus = corpus_of(tmp_path, *texts)
    assert not held_out(len(texts), 0.15).any()
    train, validation, notes = split(corpus, 0.15)
    assert validation is not None
    longest = max(texts, key=len)
    (held,) = documents(validation)
    assert f"{longest}\0".encode().endswith(held)
    assert 2 <= len(held) <= 0.15 * (len(longest) + 1)
    assert sum(map(len, documents(train))) + len(held) == len(corpus.tokens)
    assert f"the last {len(held)} tokens of the longest" in notes[0]


def test_a_part_far_from_the_asked_share_is_noted(tmp_path: Path) -> None:
    drawn = held_out(60, 0.1)
    texts = ["a long document that was drawn" * 9 if each else "short" for each in drawn]
    train, validation, notes = split(corpus_of(tmp_path, *texts), 0.1)
    assert validation is not None
    share = validation.tokens / (train.tokens + validation.tokens)
    assert share > 0.5
    assert f"{share:.1%}" in notes[0]


def test_only_empty_documents_drawn_counts_as_none(tmp_path: Path) -> None:
    drawn = held_out(40, 0.1)
    texts = ["" if each else "some text" for each in drawn]
    _, validation, notes = split(corpus_of(tmp_path, *texts), 0.1)
    assert validation is not None
    assert validation.tokens >= 2
    assert notes


@pytest.mark.parametrize(("texts", "fraction"), [(("ab",), 0.05), (("a",), 0.5), (("some", "text"), 0.999)])
def test_a_part_with_nothing_to_predict_is_refused(
    tmp_path: Path, texts: tuple[str, ...], fraction: float
) -> None:
    with pytest.raises(DataError, match="validation_fraction=0"):
        split(corpus_of(tmp_path, *texts), fraction)


def test_a_part_pickles_small_and_comes_back(tmp_path: Path) -> None:
    train, validation, _ = split(corpus_of(tmp_path, *map(str, range(2000))), 0.2)
    for part in (train, validation):
        assert part is not None
        pickled = pickle.dumps(part)
        assert len(pickled) < 1000
        assert documents(pickle.loads(pickled)) == documents(part)
