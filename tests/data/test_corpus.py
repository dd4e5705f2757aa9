"""A corpus in memory: documents with end marks, a content hash, and a small pickle."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.corpus import Corpus, open_jsonl, open_stdlib, open_text
from fourfold.spec.errors import DataError


def jsonl_of(path: Path, *texts: str) -> Corpus:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_jsonl(str(path), "text")


def test_documents_lie_back_to_back_each_with_its_end_mark(tmp_path: Path) -> None:
    corpus = jsonl_of(tmp_path / "a.jsonl", "ab", "", "c")
    assert bytes(corpus.tokens) == b"ab\0\0c\0"
    assert corpus.offsets.tolist() == [0, 3, 4, 6]
    assert len(corpus) == 3
    assert corpus.largest == ord("c")


def test_the_hash_is_of_the_documents_not_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("c")
    same = jsonl_of(tmp_path / "a.jsonl", "ab", "c")
    assert open_text(str(tmp_path)).content_hash == same.content_hash
    assert len(same.content_hash) == 32


def test_the_hash_tells_text_and_its_division_into_documents_apart(tmp_path: Path) -> None:
    texts = [("ab", "c"), ("a", "bc"), ("abc",), ("c", "ab"), ("ab", "c", ""), ("ab", "d")]
    hashes = {jsonl_of(tmp_path / f"{n}.jsonl", *each).content_hash for n, each in enumerate(texts)}
    assert len(hashes) == len(texts)


def test_the_standard_library_pickles_small_and_comes_back_the_same() -> None:
    corpus = open_stdlib()
    pickled = pickle.dumps(corpus)
    again = pickle.loads(pickled)
    assert len(pickled) < 1000
    assert again.content_hash == corpus.content_hash
    assert np.array_equal(again.tokens, corpus.tokens)


def test_a_relative_path_is_found_again_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(open_text("a.txt"))
    monkeypatch.chdir("/")
    assert bytes(pickle.loads(pickled).tokens) == b"text\0"


def test_text_changed_in_between_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    pickled = pickle.dumps(open_text(str(path)))
    path.write_text("after")
    with pytest.raises(DataError, match="changed while it was being read"):
        pickle.loads(pickled)


def test_no_text_at_all_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.txt(.|\n)*1 documents, all of them empty"):
        open_text(str(empty))
    with pytest.raises(DataError, match="no document at all"):
        jsonl_of(tmp_path / "none.jsonl")
