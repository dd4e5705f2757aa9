"""Token files: written in bounded memory, whole or not at all; opened only if they are what their header says."""

from __future__ import annotations

import errno
import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from fourfold.data import tokens
from fourfold.data.corpus import content_hash, open_jsonl, open_text
from fourfold.data.tokens import TokenHeader, open_tokens, prepare, read_header, token_paths
from fourfold.spec.errors import DataError, SpecError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of text beside its token file "made"."""
    text = tmp_path / "text"
    text.mkdir()
    for name, content in {"a": "first document", "b": "", "c": "zwei\n" * 40}.items():
        (text / f"{name}.txt").write_text(content)
    prepare(str(text), str(tmp_path / "made"), "text")
    return tmp_path


def edit_header(folder: Path, **changes: Any) -> None:
    path = folder / "made.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as error:
        open_tokens(str(path))
    return str(error.value)


def test_a_token_file_is_the_corpus_it_was_made_of(folder: Path) -> None:
    direct = open_text(str(folder / "text"))
    mapped = open_tokens(str(folder / "made.bin"))
    assert mapped.content_hash == direct.content_hash
    assert np.array_equal(mapped.tokens, direct.tokens)
    assert np.array_equal(mapped.offsets, direct.offsets)
    assert mapped.largest == direct.largest
    assert mapped.notes == ()
    assert (folder / "made.bin").read_bytes() == bytes(direct.tokens)


def test_json_lines_give_the_same_hash_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": f"document {n}"}) + "\n" for n in range(50)))
    header = prepare(str(path), str(tmp_path / "out" / "a.bin"), "jsonl", "body")
    assert header.content_hash == open_jsonl(str(path), "body").content_hash
    assert (header.documents, header.longest_document, header.largest_token) == (50, 12, ord("u"))
    assert header == read_header(str(tmp_path / "out" / "a"))


@pytest.mark.parametrize("name", ["made", "made.bin", "made.json", "made.offsets"])
def test_any_of_its_names_opens_it(folder: Path, name: str) -> None:
    assert len(open_tokens(str(folder / name))) == 3


def test_dots_in_a_name_stay() -> None:
    assert [path.name for path in token_paths("/x/c4.v2")] == ["c4.v2.bin", "c4.v2.offsets", "c4.v2.json"]


def test_it_pickles_small_and_is_mapped_again(folder: Path) -> None:
    corpus = open_tokens(str(folder / "made"))
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert isinstance(again.tokens, np.memmap)
    assert np.array_equal(again.tokens, corpus.tokens)


def test_a_file_replaced_in_between_is_refused(folder: Path) -> None:
    pickled = pickle.dumps(open_tokens(str(folder / "made")))
    edit_header(folder, content_hash="0" * 32)
    with pytest.raises(DataError, match="changed while it was being read"):
        pickle.loads(pickled)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_wider_tokens_are_read_as_little_endian(tmp_path: Path, dtype: Any) -> None:
    stored = np.array([300, 5, 0, 7, 0], dtype=np.dtype(dtype).newbyteorder("<"))
    offsets = np.array([0, 3, 5], dtype="<i8")
    stored.tofile(tmp_path / "t.bin")
    offsets.tofile(tmp_path / "t.offsets")
    header = TokenHeader(
        dtype=dtype,
        tokenizer="own",
        tokens=5,
        documents=2,
        longest_document=3,
        largest_token=300,
        content_hash=content_hash(
            np.dtype(dtype), xxhash.xxh3_128(stored.tobytes()), xxhash.xxh3_128(offsets.tobytes())
        ),
    )
    (tmp_path / "t.json").write_text(header.model_dump_json(by_alias=True))
    corpus = open_tokens(str(tmp_path / "t"))
    assert corpus.tokens.tolist() == [300, 5, 0, 7, 0]


def test_preparing_takes_memory_for_a_piece_not_for_the_text(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_bytes(b"some words and more\n" * 2_000_000)
    tracemalloc.start()
    prepare(str(path), str(tmp_path / "large"), "text")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size == 40_000_000
    assert peak < 8_000_000


def test_an_existing_output_is_not_overwritten(folder: Path) -> None:
    before = (folder / "made.bin").read_bytes()
    with pytest.raises(SpecError, match="not overwritten"):
        prepare(str(folder / "text"), str(folder / "made.bin"), "text")
    assert (folder / "made.bin").read_bytes() == before


def test_bad_text_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"fine\n" * 10 + b"\xff")
    with pytest.raises(DataError, match="line 11"):
        prepare(str(tmp_path / "bad.txt"), str(tmp_path / "out"), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        prepare(str(folder / "text"), str(folder / "other"), "text")
    assert not list(folder.glob("other*"))


def test_an_output_in_a_file_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="to write"):
        prepare(str(folder / "text"), str(folder / "made.bin" / "inner"), "text")


def test_a_cut_file_is_named_with_both_sizes(folder: Path) -> None:
    size = (folder / "made.bin").stat().st_size
    os.truncate(folder / "made.bin", size - 1)
    assert f"{size - 1} bytes" in refusal(folder / "made")
    assert f"{size} bytes in made.bin" in refusal(folder / "made")


def test_cut_offsets_are_named(folder: Path) -> None:
    os.truncate(folder / "made.offsets", 24)
    assert "made.offsets" in refusal(folder / "made")


def test_one_changed_bit_is_found(folder: Path) -> None:
    with (folder / "made.bin").open("r+b") as file:
        file.seek(4)
        file.write(b"T")
    message = refusal(folder / "made")
    assert "content_hash" in message
    assert "fourfold data prepare" in message


def test_offsets_of_another_division_are_found(folder: Path) -> None:
    offsets = np.fromfile(folder / "made.offsets", dtype="<i8")
    offsets[1] += 1
    offsets.tofile(folder / "made.offsets")
    assert "content_hash" in refusal(folder / "made")
    offsets[1] = offsets[2] + 1
    offsets.tofile(folder / "made.offsets")
    assert "other offsets" in refusal(folder / "made")


@pytest.mark.parametrize("key", ["largest_token", "longest_document"])
def test_a_header_that_says_something_else_is_found(folder: Path, key: str) -> None:
    edit_header(folder, **{key: 3})
    assert f"{key} 3" in refusal(folder / "made")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"tokens": "9"}, "tokens"),
        ({"schema": "other/1"}, "schema"),
        ({"x": 1}, "x"),
    ],
)
def test_a_header_that_is_none_is_refused_by_key(folder: Path, changes: dict[str, Any], named: str) -> None:
    edit_header(folder, **changes)
    assert named in refusal(folder / "made")


def test_a_header_without_json_and_missing_files_are_refused(folder: Path) -> None:
    (folder / "made.offsets").unlink()
    assert "no such file" in refusal(folder / "made")
    (folder / "made.json").write_text("{")
    assert "JSON" in refusal(folder / "made")
    (folder / "made.json").unlink()
    assert "the header of a token file" in refusal(folder / "made.bin")


def test_a_file_too_large_to_hash_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_verify", lambda *_: pytest.fail("hashed"))
    corpus = open_tokens(str(folder / "made"), verify_up_to=10)
    assert "not compared with its header" in corpus.notes[0]
