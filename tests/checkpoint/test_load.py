from __future__ import annotations

import pytest
import torch

from fourfold.checkpoint.load import census, load
from fourfold.checkpoint.manifest import MANIFEST, STATE
from fourfold.checkpoint.save import save
from fourfold.checkpoint.storage_reader import Needs, who_checks
from fourfold.checkpoint.validate import read_manifest
from fourfold.spec.errors import DataError
from tests.checkpoint import rank_jobs
from tests.checkpoint.example import forge

SHARD = "rank00000.safetensors"


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of three small tensors."""
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.ones(4, dtype=torch.int64),
        "c": torch.tensor(2.5),
    }
    return save(tensors, rank_jobs.STATE, tmp_path, rank_jobs.facts())


def wanted() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64), "c": torch.zeros(())}


def test_every_dtype_and_shape_comes_back_bit_by_bit(tmp_path):
    path = save(rank_jobs.every_kind(), rank_jobs.STATE, tmp_path, rank_jobs.facts())
    assert rank_jobs.differing(str(path), rank_jobs.every_kind()) == []


def test_tensors_are_filled_in_place_parameters_too(saved):
    tensors = wanted()
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    view = torch.zeros(4, 2, dtype=torch.int64)[:, 0]
    load(saved, {**tensors, "a": parameter, "b": view})
    assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert view.tolist() == [1, 1, 1, 1]
    assert float(tensors["c"]) == 2.5


def test_ranks_read_what_ranks_wrote(ranks, tmp_path):
    (path, _) = ranks(2).run(rank_jobs.save_every_kind, str(tmp_path))
    assert ranks(2).run(rank_jobs.every_kind_differs, path) == [[], []]
    assert rank_jobs.every_kind_differs(path) == []


def test_sharded_tensors_come_back_on_the_same_mesh_and_whole_on_one_rank(ranks, tmp_path):
    (path, _) = ranks(2).run(rank_jobs.save_cut, str(tmp_path), 2)
    assert ranks(2).run(rank_jobs.cut_differs, path, 2) == [[], []]
    assert ranks(2).run(rank_jobs.wholes_differ, path) == [[], []]
    assert rank_jobs.wholes_differ(path) == []


def test_boxes_of_one_layout_are_read_by_another(ranks, tmp_path):
    four = ranks(4).run(rank_jobs.save_cut, str(tmp_path), 2, 2)[0]
    assert ranks(4).run(rank_jobs.cut_differs, four, 2, 2) == [[]] * 4
    assert ranks(2).run(rank_jobs.cut_differs, four, 2) == [[], []]
    assert rank_jobs.wholes_differ(four) == []


def test_a_rank_that_does_not_check_a_file_reads_its_rows_alone(ranks, tmp_path):
    path = save(rank_jobs.wholes(), rank_jobs.STATE, tmp_path, rank_jobs.facts())
    assert ranks(2).run(rank_jobs.cut_differs, str(path), 2) == [[], []]


def test_what_one_rank_alone_saves_is_no_surplus_for_the_other(ranks, tmp_path):
    assert ranks(2).run(rank_jobs.save_own, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("where", ["header", "first", "last"])
def test_a_flipped_bit_is_refused(saved, where):
    data = bytearray((saved / SHARD).read_bytes())
    data[{"header": 20, "first": 8 + int.from_bytes(data[:8], "little"), "last": -1}[where]] ^= 1
    (saved / SHARD).write_bytes(data)
    with pytest.raises(DataError, match=SHARD):
        load(saved, wanted())


@pytest.mark.parametrize("name", [SHARD, STATE, MANIFEST])
@pytest.mark.parametrize("harm", ["gone", "short", "long"])
def test_a_missing_truncated_or_lengthened_file_is_refused(saved, name, harm):
    data = (saved / name).read_bytes()
    (saved / name).unlink()
    if harm != "gone":
        (saved / name).write_bytes(data[:-3] if harm == "short" else data + b"more")
    with pytest.raises(DataError, match=name):
        load(saved, wanted())


def test_damage_in_a_file_that_nobody_reads_from_is_found(ranks, tmp_path):
    path = ranks(2).run(rank_jobs.save_replicated, str(tmp_path))[0]
    shard = tmp_path / "step-00000010" / "rank00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 128
    shard.write_bytes(data)
    first = next(
        name for name, tensor in read_manifest(path).tensors.items() if tensor.chunks[0].file == SHARD
    )
    with pytest.raises(DataError, match=r"rank00001\.safetensors"):
        load(path, {first: torch.zeros(64, 64)}, allow_surplus=["*"])


def test_damage_that_one_rank_finds_is_told_on_all(ranks, tmp_path):
    path = ranks(2).run(rank_jobs.save_cut, str(tmp_path), 2)[0]
    shard = tmp_path / "step-00000010" / "rank00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    wants = [(name, tuple(whole.shape), str(whole.dtype)[6:]) for name, whole in rank_jobs.wholes().items()]
    tellings = ranks(2).run(rank_jobs.load_fails, path, wants)
    assert tellings[0] == tellings[1]
    assert tellings[0].count("its hash is") == 1


def test_missing_surplus_and_changed_entries_are_told_at_once_and_nothing_is_filled(saved):
    tensors = {
        "a": torch.zeros(2, 3, dtype=torch.bfloat16),
        "b": torch.zeros(5, dtype=torch.int64),
        "d": torch.zeros(1),
    }
    with pytest.raises(DataError) as caught:
        load(saved, tensors)
    said = [(problem.asked, problem.found) for problem in caught.value.problems]
    assert said == [
        ("tensor d: missing from the checkpoint", "float32 (1,)"),
        ("tensor c: in the checkpoint but not wanted", "float32 ()"),
        ("tensor a: of another dtype or shape", "float32 (2, 3) in the checkpoint, bfloat16 (2, 3) wanted"),
        ("tensor b: of another dtype or shape", "int64 (4,) in the checkpoint, int64 (5,) wanted"),
    ]
    assert all(not tensor.any() for tensor in tensors.values())


def test_named_entries_may_be_missing_or_surplus(saved):
    tensors = {"a": torch.zeros(2, 3), "new.bias": torch.full((1,), 7.0)}
    load(saved, tensors, allow_missing=["new.*"], allow_surplus=["b", "c"])
    assert tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["new.bias"].tolist() == [7.0]
    with pytest.raises(DataError, match="tensor c"):
        load(saved, tensors, allow_missing=["new.*"], allow_surplus=["b"])


def test_a_census_fault_of_one_rank_is_told_on_all(ranks, tmp_path):
    path = ranks(2).run(rank_jobs.save_replicated, str(tmp_path))[0]
    tellings = ranks(2).run(rank_jobs.only_rank_1_wants, path, "stranger")
    assert all("tensor stranger: missing" in told for told in tellings)


def test_ranks_that_want_different_shapes_are_told(saved):
    manifest = read_manifest(saved)
    same = {"a": ("float32", (2, 3)), "b": ("int64", (4,)), "c": ("float32", ())}
    assert census(manifest, [same, same]) == []
    (problem,) = census(manifest, [same, {**same, "c": ("float32", (1,))}])
    assert problem.found == "float32 () in the checkpoint, float32 (1,) wanted"


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load(tmp_path / "nothing", {})


def test_each_file_is_checked_once_on_each_machine_that_reads_it_by_who_reads_most():
    one, two = Needs("m", {"f": 5, "g": 5}), Needs("m", {"f": 9, "g": 5})
    assert who_checks(["f", "g", "unread"], [one, two]) == [["g", "unread"], ["f"]]
    other = Needs("n", {"g": 1})
    assert who_checks(["f", "g", "unread"], [one, two, other]) == [["g", "unread"], ["f"], ["g"]]
    assert who_checks(["f"], [Needs("m", {}), Needs("n", {})]) == [["f"], []]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "list, not an object"),
    ],
)
def test_a_state_that_is_none_is_told_as_damage(saved, data, says):
    """Even where the manifest was sealed over it again."""
    (saved / STATE).write_bytes(data)
    forge(saved, lambda body: body)
    with pytest.raises(DataError, match=says):
        load(saved, wanted())
