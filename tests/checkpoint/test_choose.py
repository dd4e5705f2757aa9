"""The newest whole checkpoint, by its own step: not by a folder's name, not by a pointer, not by its looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.checkpoint import choose
from fourfold.checkpoint.choose import newest_valid
from fourfold.checkpoint.manifest import MANIFEST
from fourfold.checkpoint.validate import validate
from fourfold.spec.errors import DataError
from tests.checkpoint.example import FILES, flip, forge, leave_unfinished, truncate, write_checkpoint


def passed_over(ckpt_dir: Path) -> dict[str, str]:
    return {path.name: reason for path, reason in newest_valid(ckpt_dir).passed_over}


def test_numbers_are_numbers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 9900, "9900")
    newest = write_checkpoint(tmp_path, 10000, "10000")
    choice = newest_valid(tmp_path)
    assert (choice.path, choice.step, choice.passed_over) == (newest, 10000, ())


def test_names_and_pointers_say_nothing(tmp_path: Path) -> None:
    newest = write_checkpoint(tmp_path, 20, "step-00000001")
    older = write_checkpoint(tmp_path, 10, "step-99999999")
    (tmp_path / "latest").symlink_to(older.name)
    (tmp_path / "latest.txt").write_text(older.name)
    assert newest_valid(tmp_path).path == newest
    assert passed_over(tmp_path) == {"latest": "a link: what it points at can change"}


def test_a_stale_broken_folder_of_a_higher_number(tmp_path: Path) -> None:
    valid = write_checkpoint(tmp_path, 100)
    stale = write_checkpoint(tmp_path, 9000)
    (stale / FILES[1]).unlink()
    (tmp_path / "step-00009999").mkdir()
    choice = newest_valid(tmp_path)
    assert (choice.path, choice.step) == (valid, 100)
    assert passed_over(tmp_path) == {
        "step-00009000": f"{FILES[1]}: No such file or directory",
        "step-00009999": f"{MANIFEST}: not there",
    }


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "foreign", "newer", "manifest"])
def test_it_falls_back_and_says_why(tmp_path: Path, damage: str) -> None:
    valid, newer = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    if damage == "flip":
        flip(newer / FILES[0], 8 * (newer / FILES[0]).stat().st_size - 1)
    elif damage == "cut":
        truncate(newer / FILES[0])
    elif damage == "missing":
        (newer / FILES[0]).unlink()
    elif damage == "foreign":
        (newer / "notes.txt").write_text("mine")
    elif damage == "newer":
        forge(newer, lambda body: body.update(schema="fourfold.checkpoint/2"))
    else:
        truncate(newer / MANIFEST)
    says = {
        "flip": "its hash is",
        "cut": "bytes, not",
        "missing": "No such file",
        "foreign": "notes.txt: a foreign file",
        "newer": "format version 2",
        "manifest": "not JSON",
    }
    choice = newest_valid(tmp_path)
    assert (choice.path, choice.step) == (valid, 10)
    assert says[damage] in passed_over(tmp_path)[newer.name]


def test_leftovers_are_named(tmp_path: Path) -> None:
    valid = write_checkpoint(tmp_path, 10)
    saving = leave_unfinished(tmp_path, 20)
    whole = write_checkpoint(tmp_path, 30, ".removing-step-00000030-abcd")
    assert newest_valid(tmp_path).path == valid
    assert passed_over(tmp_path) == {
        saving.name: "a save that was not finished",
        whole.name: "a removal that was not finished",
    }


def test_none(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        choice = newest_valid(place)
        assert (choice.path, choice.step, choice.passed_over) == (None, None, ())
    only = write_checkpoint(tmp_path, 10)
    truncate(only / FILES[0])
    assert newest_valid(tmp_path).path is None
    assert list(passed_over(tmp_path)) == [only.name]


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("a file")
    with pytest.raises(DataError, match="Not a directory"):
        newest_valid(tmp_path / "ckpt")


def test_what_is_cut_is_not_hashed_and_older_ones_are_not_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    truncate(write_checkpoint(tmp_path, 30) / FILES[0])
    asked = []

    def noting(folder: Path, *, hashes: bool = True) -> object:
        asked.append((folder.name, hashes))
        return validate(folder, hashes=hashes)

    monkeypatch.setattr(choose, "validate", noting)
    assert newest_valid(tmp_path).step == 20
    assert asked == [("step-00000030", False), ("step-00000020", False), ("step-00000020", True)]


def test_of_one_step_twice_the_later(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10, "b", created=100.0)
    later = write_checkpoint(tmp_path, 10, "a", created=200.0)
    assert newest_valid(tmp_path).path == later


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=4), st.data())
def test_any_steps_any_of_them_broken(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("ckpt")
    broken = data.draw(st.sets(st.sampled_from(steps))) if steps else set()
    for number, step in enumerate(steps):
        folder = write_checkpoint(place, step, f"{number}")
        if step in broken:
            flip(folder / FILES[0], 500)
    choice = newest_valid(place)
    assert choice.step == max(set(steps) - broken, default=None)
    assert len(choice.passed_over) == sum(1 for step in broken if step > (choice.step or -1))
