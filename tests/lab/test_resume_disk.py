from __future__ import annotations

import json

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from fourfold.checkpoint.choose import Choice, PassedOver
from fourfold.checkpoint.validate import validate
from fourfold.lab.resume_disk import (
    Row,
    bits_of,
    compared,
    cut_off,
    flip_bit,
    interrupted,
    read_where_the_mark_points,
    said,
    sample_ids,
    saved,
    streams_in,
    tensors_there,
)
from fourfold.record.run_dir import RunDir, claim
from fourfold.record.writer import JsonLines, write_json
from fourfold.spec.errors import DataError, SpecError
from tests.checkpoint.example import write_checkpoint

STEPS = range(1, 5)


@pytest.fixture
def run(tmp_path):
    """Four steps of two ranks, saved after the second and the fourth."""
    made = claim(tmp_path / "run")
    for file in (made.spec_toml, made.spec_json, made.plan_json):
        write_json(file, {})
    with JsonLines(made.metrics) as lines:
        for step in STEPS:
            lines.write({"step": step, "loss": 1 / step, "grad_norm": 0.1, "lr": 0.01})
            lines.write({"step": step, "validation_loss": 2.0})
    for rank in (0, 1):
        with JsonLines(made.events(rank)) as events:
            events.write({"step": 0, "kind": "start"})
            for step in STEPS:
                events.write({"step": step, "kind": "step", "sample_ids": [10 * step + rank]})
            events.write({"step": 4, "kind": "end"})
    for step in (2, 4):
        write_checkpoint(made.checkpoints, step)
    return made


def test_an_interrupted_run_has_nothing_after_the_step(run, tmp_path):
    copied = interrupted(run, tmp_path / "copy", 2, [2])
    assert sample_ids(copied) == {1: [[10], [11]], 2: [[20], [21]]}
    assert run.metrics.read_bytes().startswith(copied.metrics.read_bytes())
    assert [json.loads(line)["step"] for line in copied.metrics.read_text().splitlines()] == [1, 1, 2, 2]
    assert [path.name for path in copied.checkpoints.iterdir()] == ["step-00000002"]
    assert validate(saved(copied, 2)) == []
    assert interrupted(run, tmp_path / "none", 0, []).metrics.read_text() == ""
    with pytest.raises(SpecError, match="used already"):
        interrupted(run, tmp_path / "copy", 2, [])


def test_compared_is_about_every_bit(run, tmp_path):
    other = interrupted(run, tmp_path / "other", 4, [])
    assert all(row.same for row in compared(run, other, 0))
    assert [row.step for row in compared(run, other, 2)] == [3, 4] and compared(run, other, 4) == []
    other.metrics.write_text(other.metrics.read_text().replace('"lr": 0.01', '"lr": 0.010000000000000002', 1))
    assert [row.same for row in compared(run, other, 0)] == [False, True, True, True]
    assert [row.difference for row in compared(run, other, 0)] == [0.0] * 4


def test_a_row_is_the_same_only_in_all_of_it():
    assert Row(1, 0.5, 0.5, True, True).same
    assert not Row(1, 0.5, 0.5 + 2**-53, True, True).same
    assert not Row(1, 0.5, 0.5, False, True).same and not Row(1, 0.5, 0.5, True, False).same
    assert not Row(1, 0.5, float("nan"), True, True).same


def test_the_last_of_two_records_of_a_step_counts(run):
    for rank in (0, 1):
        with JsonLines(run.events(rank)) as events:
            events.write({"step": 4, "kind": "step", "sample_ids": [99 + rank]})
    assert sample_ids(run)[4] == [[99], [100]]


def test_a_bit_that_flips_twice_has_not_flipped(run):
    folder = saved(run, 4)
    before = bits_of(folder)
    flip = flip_bit(folder, "model.weight", 31)  # the sign
    assert (flip.before, flip.after) == (4.0, -4.0) and flip.bits == 8 * flip.file.stat().st_size
    after = bits_of(folder)
    assert [name for name in before if before[name] != after[name]] == ["model.weight:0"]
    (problem,) = validate(folder)
    assert problem.asked == flip.file.name
    assert flip_bit(folder, "model.weight", 31).after == 4.0
    assert validate(folder) == []
    with pytest.raises(KeyError):
        flip_bit(folder, "model.other", 0)


def test_bits_are_those_of_another_reader(run):
    folder = saved(run, 2)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as reader:
            keys = set(reader.keys())
        held = bits_of(folder)
        assert keys <= held.keys()
        if "optimizer.step" in keys:
            assert held["optimizer.step"] == load_file(file)["optimizer.step"].tobytes()
    with pytest.raises(DataError):
        bits_of(run.path)


def test_streams_are_counted_by_rank():
    names = ["rank1.torch", "model.rank", "rank0.torch", "rank0.numpy", "optimizer.rank0.step"]
    assert list(streams_in(names).items()) == [("rank0", 2), ("rank1", 1)]
    assert streams_in([]) == {}


def test_what_is_there_of_a_checkpoint_is_told(run, tmp_path):
    assert tensors_there(run, 2, saved(run, 4)) == "4 of 4 tensors"
    folder = tmp_path / "cut"
    folder.mkdir()
    assert cut_off(folder, saved(run, 4)) == ""
    (folder / "rank00000.safetensors").write_bytes(b"ab")
    size = (saved(run, 4) / "rank00000.safetensors").stat().st_size
    assert cut_off(folder, saved(run, 4)) == f"rank00000.safetensors has 2 of {size:,} bytes"


def test_a_trusting_reader_fails_where_a_shard_is_cut_off(run):
    (run.checkpoints / "latest").write_text("step-00000004")
    assert read_where_the_mark_points(run.checkpoints) == ""
    file = saved(run, 4) / "rank00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "incomplete" in read_where_the_mark_points(run.checkpoints)


def test_a_choice_is_told_as_it_was_made(run):
    folder = saved(run, 2)
    passed = (PassedOver(saved(run, 4), "no reason"),)
    assert said(Choice(folder, 2, passed)) == [
        "passed over step-00000004: no reason",
        "goes on from step-00000002",
    ]
    assert said(Choice(None, None, ())) == ["nothing to go on from"]
    assert RunDir(run.path).checkpoints == folder.parent
