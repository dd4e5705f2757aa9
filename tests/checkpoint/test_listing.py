"""What lies in a ckpt folder, one entry for each folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.checkpoint.hold import holding
from fourfold.checkpoint.listing import list_checkpoints
from fourfold.spec.errors import DataError
from tests.checkpoint.example import FILES, flip, leave_unfinished, truncate, write_checkpoint


def test_every_folder_has_one_entry(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
    truncate(tmp_path / "step-00000040" / FILES[1])
    file = tmp_path / "step-00000030" / FILES[0]
    flip(file, 8 * file.stat().st_size - 1)  # in the last tensor: only a hash tells
    truncate(tmp_path / "step-00000020" / "manifest.json")
    leave_unfinished(tmp_path, 50)
    (tmp_path / ".removing-step-00000005-ab").mkdir()
    write_checkpoint(tmp_path, 9, ".aside-step-00000009-ab")
    (tmp_path / ".aside-step-00000008-cd").mkdir()
    listing = list_checkpoints(tmp_path)
    assert listing.newest_valid == str(tmp_path / "step-00000030")
    assert [(entry.state, entry.step) for entry in listing.entries] == [
        ("damaged", 40), ("valid", 30), ("valid", 10), ("damaged", None), ("unfinished", None),
        ("unfinished", None), ("set aside", 9), ("set aside", None),
    ]  # fmt: skip
    newest = listing.of("valid")[0]
    assert (newest.position, newest.created, newest.why) == (480, 1.8e9 + 30, "")
    assert newest.bytes == sum(
        file.stat().st_size for file in (tmp_path / "step-00000030").iterdir() if file.name != "manifest.json"
    )
    told = listing.document()
    assert (told["schema"], told["valid"], len(told["checkpoints"])) == ("fourfold.ckpt.list/1", 2, 8)
    with holding(tmp_path / ".saving-step-00000050-abcd"):
        assert len(list_checkpoints(tmp_path).of("saving")) == 1


def test_nothing(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none").entries == ()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError):
        list_checkpoints(tmp_path / "file")
