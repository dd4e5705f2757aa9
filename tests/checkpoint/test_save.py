from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fourfold.checkpoint.choose import newest_valid
from fourfold.checkpoint.manifest import STATE
from fourfold.checkpoint.publish import publish, try_out
from fourfold.checkpoint.save import save
from fourfold.checkpoint.validate import read_manifest, validate
from fourfold.launch.pool import RankPool
from fourfold.spec.errors import DataError, FourfoldError, RankFailed
from tests.checkpoint import rank_jobs

NAME = "step-00000010"


@pytest.fixture(scope="module", autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_checkpoint_is_whole_by_every_check_and_nothing_is_left_beside_it(tmp_path):
    saved = save(rank_jobs.every_kind(), rank_jobs.STATE, tmp_path / "new" / "ckpt", rank_jobs.facts())
    assert saved == tmp_path / "new" / "ckpt" / NAME
    assert validate(saved) == []
    assert rank_jobs.parts(str(saved.parent)) == [NAME]
    assert rank_jobs.parts(str(saved)) == ["manifest.json", "rank00000.safetensors", "state.json"]
    assert json.loads((saved / STATE).read_bytes()) == rank_jobs.STATE
    manifest = read_manifest(saved)
    assert (manifest.step, manifest.position, manifest.world) == (10, 80, 1)
    assert manifest.layout == {"dp_shard": 2, "sp": False}
    assert (manifest.spec_hash, manifest.data_hash) == ("0" * 32, "1" * 32)
    assert set(manifest.versions) == {"fourfold", "torch", "python"}


def test_the_file_is_a_safetensors_file_for_its_own_library_too(tmp_path):
    tensors = rank_jobs.every_kind()
    saved = save(tensors, {}, tmp_path, rank_jobs.facts())
    found = load_file(saved / "rank00000.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert rank_jobs.bits(found[name]) == rank_jobs.bits(tensor)


def test_a_checkpoint_without_tensors_is_one(tmp_path):
    saved = save({}, {"a": 1}, tmp_path, rank_jobs.facts(0))
    assert validate(saved) == []
    assert read_manifest(saved).tensors == {}


def test_a_step_is_saved_once(tmp_path):
    for name in (NAME, "step-00000011"):
        (tmp_path / name).mkdir()  # empty: a rename alone would replace it without a word
    with pytest.raises(DataError, match="one of that name already"):
        save({}, {}, tmp_path, rank_jobs.facts())
    leftover = tmp_path / ".saving-step-00000011-x"
    leftover.mkdir()
    with pytest.raises(DataError, match="one of that name already"):
        publish(leftover, rank_jobs.facts(11), "{}", {}, 1, {}, {})
    assert rank_jobs.parts(str(tmp_path / NAME)) == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="begin a checkpoint"):
        save({}, {}, tmp_path / "file" / "ckpt", rank_jobs.facts())


@pytest.mark.parametrize(
    ("tensors", "state", "said"),
    [
        ({"a": torch.zeros(2, dtype=torch.complex128)}, {}, "dtype complex128"),
        ({"a": torch.zeros(2)}, {"loss": float("nan")}, "JSON compliant"),
        ({"a": torch.zeros(2)}, {"loss": {1, 2}}, "JSON serializable"),
    ],
)
def test_what_has_no_place_in_a_checkpoint_is_refused_and_leaves_nothing(tmp_path, tensors, state, said):
    with pytest.raises(FourfoldError, match=said):
        save(tensors, state, tmp_path / "ckpt", rank_jobs.facts())
    assert not (tmp_path / "ckpt").exists()


def test_nothing_is_pickled_in_a_world_of_one(ranks, tmp_path):
    assert ranks(1).run(rank_jobs.no_pickle, str(tmp_path)) == [[]]
    assert rank_jobs.no_pickle(str(tmp_path / "without a group")) == []


def test_replicated_tensors_are_written_once_and_shared_out_over_the_ranks(ranks, tmp_path):
    paths = ranks(2).run(rank_jobs.save_replicated, str(tmp_path))
    assert paths == [str(tmp_path / NAME)] * 2
    assert validate(paths[0]) == []
    manifest = read_manifest(paths[0])
    assert manifest.world == 2
    files = [chunk.file for tensor in manifest.tensors.values() for chunk in tensor.chunks]
    assert sorted(files) == ["rank00000.safetensors"] * 4 + ["rank00001.safetensors"] * 4


def test_a_large_replicated_tensor_that_comes_last_upsets_no_balance(ranks, tmp_path):
    tensors = read_manifest(ranks(2).run(rank_jobs.save_small_ones_first, str(tmp_path))[0]).tensors
    a, b, c = (tensors[name].chunks[0].file for name in "abc")
    assert a == b != c


def test_sharded_tensors_lie_in_the_boxes_of_their_ranks(ranks, tmp_path):
    (path, _) = ranks(2).run(rank_jobs.save_cut, str(tmp_path), 2)
    assert validate(path) == []
    tensors = read_manifest(path).tensors
    assert [(chunk.offset, chunk.size) for chunk in tensors["rows"].chunks] == [
        ((0, 0), (3, 6)),
        ((3, 0), (2, 6)),
    ]
    assert [chunk.size for chunk in tensors["one row"].chunks] == [(1, 6)]
    assert tensors["columns"].shape == (4, 3)


@pytest.mark.parametrize("who", [0, 1])
def test_a_full_disk_on_one_rank_is_told_on_all_and_leaves_no_folder(ranks, tmp_path, who):
    tellings = ranks(2).run(rank_jobs.disk_full_on, who, str(tmp_path))
    assert tellings[0] == tellings[1]
    assert "File too large" in tellings[0]
    assert f"rank {who}" in tellings[0]
    assert "every earlier checkpoint is untouched" in tellings[0]
    assert rank_jobs.parts(str(tmp_path)) == []


def test_a_step_saved_already_is_told_on_all_ranks_and_the_old_one_stays(ranks, tmp_path):
    ranks(2).run(rank_jobs.save_replicated, str(tmp_path))
    tellings = ranks(2).run(rank_jobs.save_fails, str(tmp_path))
    assert all("one of that name already" in told for told in tellings)
    assert rank_jobs.parts(str(tmp_path)) == [NAME]
    assert validate(tmp_path / NAME) == []


def test_a_disk_that_fails_at_the_flush_is_noticed(tmp_path):
    told = rank_jobs.flush_fails(str(tmp_path))
    assert "write tensors of a checkpoint" in told
    assert "Input/output error" in told
    assert rank_jobs.parts(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("who", "place"),
    [
        *((who, place) for place in rank_jobs.PLACES for who in (0, 1)),
        *((0, p) for p in rank_jobs.PLACES_OF_0),
    ],
)
def test_no_room_anywhere_in_a_save_leaves_the_older_checkpoint_and_the_step_can_be_saved_later(
    ranks, tmp_path, who, place
):
    place_of = tmp_path / "ckpt"
    ranks(2).run(rank_jobs.save_replicated, str(place_of), 10)
    tellings = ranks(2).run(rank_jobs.save_without_room, str(place_of), who, place, 20)
    assert tellings[0] == tellings[1]
    for part in ("No space left on device", f"rank {who}", f"df -h {place_of} "):
        assert part in tellings[0]
    assert rank_jobs.parts(str(place_of)) == [NAME]
    assert validate(place_of / NAME) == []
    assert newest_valid(place_of).path == place_of / NAME
    path = ranks(2).run(rank_jobs.save_replicated, str(place_of), 20)[0]
    assert newest_valid(place_of).path == Path(path)
    assert ranks(2).run(rank_jobs.replicated_differs, path) == [[], []]


def test_no_rank_goes_on_before_the_room_of_a_failed_save_is_given_back(ranks, tmp_path):
    """It has a line to write about it, on the same disk."""
    assert ranks(2).run(rank_jobs.left_when_told, str(tmp_path)) == [[], []]


def test_no_rank_holds_more_of_the_state_than_its_own(ranks, tmp_path):
    for saving, loading in ranks(2).run(rank_jobs.peak_of_a_round_trip, str(tmp_path), 96):
        assert saving < 32 * 2**20
        assert loading < 32 * 2**20


def test_where_no_checkpoint_can_be_kept_is_found_out_before(tmp_path):
    try_out(tmp_path / "run" / "ckpt")
    assert rank_jobs.parts(str(tmp_path / "run" / "ckpt")) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="keep checkpoints"):
        try_out(tmp_path / "file")
    with rank_jobs.no_room("mkdir"), pytest.raises(DataError, match="No space left") as caught:
        try_out(tmp_path / "run" / "ckpt")
    assert "df -h" in caught.value.problems[0].instead


@pytest.mark.parametrize(("who", "place"), [(1, "file"), (1, "written"), (0, "manifest"), (0, "rename")])
def test_a_rank_killed_in_a_save_leaves_the_older_checkpoint_the_newest(ranks, tmp_path, who, place):
    ranks(2).run(rank_jobs.save_replicated, str(tmp_path), 10)
    with (
        RankPool(2, timeout_s=60) as pool,
        pytest.raises(RankFailed, match=f"rank {who} was killed by SIGKILL"),
    ):
        pool.run(rank_jobs.save_killed, str(tmp_path), who, place)
    assert [name for name in rank_jobs.parts(str(tmp_path)) if not name.startswith(".saving-")] == [NAME]
    assert newest_valid(tmp_path).path == tmp_path / NAME
    assert ranks(2).run(rank_jobs.replicated_differs, str(tmp_path / NAME)) == [[], []]
    path = ranks(2).run(rank_jobs.save_replicated, str(tmp_path), 20)[0]
    assert newest_valid(tmp_path).path == Path(path)
