"""What a checkpoint holds, and which one a path means."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.checkpoint.inspect import checkpoints_at, ckpt_dir_of, describe
from fourfold.checkpoint.manifest import MANIFEST
from fourfold.spec.errors import DataError
from tests.checkpoint.example import FILES, forge, leave_unfinished, truncate, write_checkpoint


def test_the_document(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    told = describe(folder)
    assert told["schema"] == "fourfold.ckpt.inspect/1" and told["format"] == "fourfold.checkpoint/1"
    assert (told["step"], told["position"], told["world"]) == (10, 160, 2)
    assert told["layout"] == {"dp_replicate": 2, "sp": False}
    assert told["versions"]["torch"] == "2.13.0"
    assert told["bytes"] == sum(path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST)
    assert [row["name"] for row in told["tensors"]] == [
        "model.weight",
        "model.table",
        "optimizer.step",
        "model.none",
    ]
    assert told["tensors"][0] == {
        "name": "model.weight",
        "dtype": "float32",
        "shape": [5, 3],
        "elements": 15,
        "bytes": 60,
        "chunks": 2,
    }
    assert told["tensors"][2]["bytes"] == 8 and told["tensors"][3]["bytes"] == 0


def test_only_the_manifest_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    for name in FILES:
        (folder / name).unlink()
    assert describe(folder)["step"] == 10
    truncate(folder / MANIFEST)
    with pytest.raises(DataError):
        describe(folder)


def test_an_unknown_dtype_has_no_size(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    forge(folder, lambda body: body["tensors"]["model.weight"].update(dtype="float31"))
    assert describe(folder)["tensors"][0]["bytes"] is None


def test_what_a_path_means(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny-1"
    place = run / "ckpt"
    write_checkpoint(place, 9900, "9900")
    newest = write_checkpoint(place, 10000, "10000")
    assert ckpt_dir_of(run) == ckpt_dir_of(place) == place
    assert checkpoints_at(newest) == checkpoints_at(place) == checkpoints_at(run) == (newest,)
    assert checkpoints_at(place / "9900") == (place / "9900",)
    truncate(place / "9900" / MANIFEST)
    (place / "latest").symlink_to("9900")
    assert checkpoints_at(run) == (newest, place / "9900")  # its step cannot be told: it might be the newest
    assert checkpoints_at(place / "9900") == (place / "9900",)


def test_a_checkpoint_that_lost_its_manifest_is_still_meant(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / MANIFEST).unlink()
    assert checkpoints_at(folder) == checkpoints_at(tmp_path) == (folder,)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing has that name"):
        checkpoints_at(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="a file, not a folder"):
        checkpoints_at(tmp_path / "file")
    run = tmp_path / "run"
    run.mkdir()
    (run / "spec.json").write_text("{}")
    with pytest.raises(DataError, match=r"no checkpoint was saved in it"):
        checkpoints_at(run)
    leave_unfinished(run / "ckpt", 10)
    for place in (run, run / "ckpt"):
        with pytest.raises(DataError, match=r"unfinished saves: 1"):
            checkpoints_at(place)
