"""A checkpoint is whole, or it is said what is not: every byte, every name, every chunk."""

from __future__ import annotations

import builtins
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fourfold.checkpoint import validate as product
from fourfold.checkpoint.header import read_header
from fourfold.checkpoint.manifest import MANIFEST, STATE, Chunk, TensorRecord
from fourfold.checkpoint.tensors import _uncovered
from fourfold.checkpoint.validate import (
    CLAIMS,
    COVERED,
    HASHES,
    NO_FOREIGN,
    SIZES,
    STORED,
    WHOLE,
    examine,
    validate,
)
from fourfold.spec.errors import DataError
from tests.checkpoint.example import FILES, flip, forge, truncate, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "ckpt")


def wrong(folder: Path) -> dict[str, str]:
    """What does not hold, by claim, and the first problem with it."""
    return {
        claim: f"{problems[0].asked}: {problems[0].found}"
        for claim, problems in examine(folder).items()
        if problems
    }


def test_a_whole_one(folder: Path) -> None:
    assert validate(folder) == []
    assert tuple(examine(folder)) == CLAIMS
    assert validate(folder, hashes=False) == [] and HASHES not in examine(folder, hashes=False)
    assert validate(str(folder)) == []


@pytest.mark.parametrize("name", [*FILES, STATE])
def test_many_flipped_bits_are_all_found(folder: Path, name: str) -> None:
    size = (folder / name).stat().st_size
    bits = random.Random(0).sample(range(size * 8), min(200, size * 8))
    for bit in bits:
        flip(folder / name, bit)
        assert set(wrong(folder)) == {HASHES}, f"bit {bit} of {name}"
        flip(folder / name, bit)
    assert validate(folder) == []


@pytest.mark.parametrize("name", [*FILES, STATE])
@pytest.mark.parametrize("by", [1, -1, "all"])
def test_a_file_of_another_length(folder: Path, name: str, by: int | str) -> None:
    size = (folder / name).stat().st_size
    truncate(folder / name, size if by == "all" else int(by))
    assert f"not {size:,}" in wrong(folder)[SIZES]
    assert validate(folder, hashes=False)


@pytest.mark.parametrize("name", [*FILES, STATE])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert wrong(folder) == {SIZES: f"{name}: No such file or directory"}


def test_no_manifest_leaves_the_rest_open(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    assert list(examine(folder)) == [WHOLE]
    assert "not there" in wrong(folder)[WHOLE]


def test_a_foreign_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "more").mkdir()
    assert wrong(folder) == {NO_FOREIGN: "more: a foreign file"}
    assert len(validate(folder)) == 2


def test_swapped_files_of_one_size(folder: Path) -> None:
    """Both are whole files of this kind; only they are not where they were."""
    other = write_checkpoint(folder.parent, 20)
    for name in FILES:
        assert (folder / name).stat().st_size == (other / name).stat().st_size
    os.rename(folder / FILES[0], folder.parent / "aside")
    os.rename(other / FILES[0], folder / FILES[0])
    os.rename(folder.parent / "aside", other / FILES[0])
    assert validate(folder, hashes=False) == []
    assert set(wrong(folder)) == set(wrong(other)) == {HASHES}


def test_a_manifest_of_another_step(folder: Path) -> None:
    other = write_checkpoint(folder.parent, 20)
    (folder / MANIFEST).write_bytes((other / MANIFEST).read_bytes())
    assert set(wrong(folder)) == {HASHES}


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_plain_file(folder: Path, kind: str) -> None:
    path = folder / FILES[0]
    os.rename(path, folder.parent / "elsewhere")
    if kind == "link":
        path.symlink_to(folder.parent / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)  # opening one would wait for ever
    else:
        path.mkdir()
    assert wrong(folder) == {SIZES: f"{FILES[0]}: not a plain file"}


def test_read_errors_are_problems(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Any, *rest: Any, **more: Any) -> Any:
        if str(path).endswith(FILES[0]):
            raise OSError(5, "Input/output error")
        return builtins.open(path, *rest, **more)

    monkeypatch.setattr(product, "open", failing, raising=False)
    assert wrong(folder) == {HASHES: f"{FILES[0]}: Input/output error"}
    monkeypatch.setattr(product.os, "listdir", lambda _: failing(FILES[0]))
    assert "Input/output error" in wrong(folder)[NO_FOREIGN]


def test_an_unreadable_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    assert "Is a directory" in wrong(folder)[WHOLE]


def chunks(body: dict[str, Any], name: str = "model.weight") -> Any:
    return body["tensors"][name]["chunks"]


@pytest.mark.parametrize(
    ("edit", "claim", "says"),
    [
        (lambda b: chunks(b).pop(), COVERED, "model.weight: 9 of its 15 elements"),
        (lambda b: chunks(b)[1].update(offset=[2, 0]), COVERED, "held twice, from (2, 0), size (1, 3)"),
        (lambda b: chunks(b)[1].update(offset=[4, 0]), COVERED, "beyond shape (5, 3)"),
        (lambda b: chunks(b)[1].update(offset=[3]), COVERED, "of a tensor of shape (5, 3)"),
        (lambda b: b["tensors"]["optimizer.step"].update(chunks=[]), COVERED, "0 of its 1 elements"),
        (lambda b: chunks(b, "optimizer.step").append(chunks(b, "optimizer.step")[0]), COVERED, "twice"),
        (lambda b: chunks(b)[0].update(key="model.wait:0"), STORED, f"{FILES[0]} has no model.wait:0"),
        (lambda b: chunks(b)[0].update(file=FILES[1]), STORED, f"{FILES[1]} has no model.weight:0"),
        (lambda b: chunks(b)[0].update(file="rank9.safetensors"), STORED, "no safetensors file of this"),
        (lambda b: chunks(b)[0].update(file=STATE), STORED, "no safetensors file of this checkpoint"),
        (lambda b: b["tensors"]["model.weight"].update(dtype="int32"), STORED, "is F32 (3, 3), not I32"),
        (lambda b: b["tensors"]["model.weight"].update(dtype="float31"), STORED, "unknown dtype, float31"),
        (lambda b: chunks(b)[0].update(size=[2, 3]), STORED, "is F32 (3, 3), not F32 (2, 3)"),
        (lambda b: b["tensors"].pop("optimizer.step"), STORED, "in the file, but of no tensor"),
        (lambda b: chunks(b, "model.table")[2].update(key="model.table:0"), STORED, "named by two chunks"),
    ],
)
def test_tensors_that_are_not_whole(folder: Path, edit: Any, claim: str, says: str) -> None:
    forge(folder, edit)
    found = [f"{problem.asked}: {problem.found}" for problem in examine(folder)[claim]]
    assert any(says in each for each in found), found


def test_a_file_with_other_tensors(folder: Path) -> None:
    arrays = load_file(folder / FILES[0])
    arrays["surplus"] = np.zeros(3)
    save_file(arrays, folder / FILES[0])
    forge(folder, lambda body: body)
    assert wrong(folder) == {STORED: f"surplus in {FILES[0]}: in the file, but of no tensor"}


def header_of(entries: dict[str, Any], held: int) -> bytes:
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + bytes(held)


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "header"),
        (b"\xff" * 8, "a header of"),
        ((1000).to_bytes(8, "little") + b"{}", "a header of 1,000 bytes"),
        ((2).to_bytes(8, "little") + b"{]", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not an object"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not JSON"),
        (header_of({"a": entry(0, 8)}, 9), "9 bytes of tensors, 8 told of"),
        (header_of({"a": entry(0, 8)}, 7), "7 bytes of tensors, 8 told of"),
        (header_of({"a": entry(4, 12)}, 12), "belongs to no tensor"),
        (header_of({"a": entry(0, 8), "b": entry(4, 12)}, 12), "or to two"),
        (header_of({"a": entry(0, 7)}, 7), "does not describe 'a'"),
        (header_of({"a": entry(0, 8, "F31")}, 8), "does not describe 'a'"),
        (header_of({"a": entry(0, 8, shape=(-2,))}, 8), "does not describe 'a'"),
        (header_of({"a": 5}, 8), "does not describe 'a'"),
    ],
)
def test_a_file_that_is_no_safetensors(folder: Path, data: bytes, says: str) -> None:
    (folder / FILES[0]).write_bytes(data)
    with pytest.raises(DataError, match=says):
        read_header(folder / FILES[0])
    forge(folder, lambda body: body)
    assert says in wrong(folder)[STORED]


def test_a_header_tells_where_the_bytes_are(folder: Path) -> None:
    data = (folder / FILES[0]).read_bytes()
    header = read_header(folder / FILES[0])
    for key, array in load_file(folder / FILES[0]).items():
        stored = header[key]
        assert data[stored.begin : stored.end] == array.tobytes()
        assert stored.shape == array.shape
    assert read_header(folder / FILES[1]).keys() == load_file(folder / FILES[1]).keys()
    with pytest.raises(DataError, match="No such file"):
        read_header(folder / "nowhere")


@given(st.data())
def test_cut_up_at_random_it_is_covered_and_without_a_part_it_is_not(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 8)) if shape else 0):
        offset, size = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, size[dim]))  # 0: an empty chunk, which is no harm
        for start, length in ((offset[dim], at), (offset[dim] + at, size[dim] - at)):
            moved, cut = list(offset), list(size)
            moved[dim], cut[dim] = start, length
            boxes.append((tuple(moved), tuple(cut)))
    parts = [Chunk(file="f", key=str(box), offset=box[0], size=box[1]) for box in boxes]
    parts = data.draw(st.permutations(parts))
    assert _uncovered(TensorRecord(dtype="int8", shape=shape, chunks=tuple(parts))) == ""
    held = [part for part in parts if np.prod(part.size)]
    lost = data.draw(st.sampled_from(held))
    less = tuple(part for part in parts if part is not lost)
    assert "of its" in _uncovered(TensorRecord(dtype="int8", shape=shape, chunks=less))
    assert "twice" in _uncovered(TensorRecord(dtype="int8", shape=shape, chunks=(*parts, lost)))
    if len(held) > 1:  # one part in another's place: the number of elements alone might be right
        first, second = held[:2]
        moved_part = first.model_copy(update={"offset": second.offset, "size": second.size})
        swapped = tuple(moved_part if part is first else part for part in parts)
        assert _uncovered(TensorRecord(dtype="int8", shape=shape, chunks=swapped)) != ""


def test_nothing_is_unpickled_and_neither_torch_nor_numpy_is_imported(folder: Path) -> None:
    code = """
import pickle, sys
def refuse(*a, **k): raise AssertionError("unpickled")
pickle.load = pickle.loads = pickle.Unpickler = refuse
from fourfold.checkpoint import choose, inspect, retention, validate
assert not validate.validate(sys.argv[1])
inspect.describe(sys.argv[1])
retention.execute(retention.plan_prune(sys.argv[1] + "/..", 1))
print(*sorted({"torch", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("\n", "")
