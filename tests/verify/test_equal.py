from __future__ import annotations

import json

import numpy as np
import pytest

from fourfold.data.source import open_sources
from fourfold.spec.errors import SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.train.setup import batch_schedule
from fourfold.verify.equal import verify_equal
from fourfold.verify.uneven import UnevenSource, choose_salt, masked, sharpened, valid_by_rank

MLP = ('model.kind="mlp"', "model.inputs=8", "model.dropout=0.2", 'data.kind="synthetic"', "data.samples=64")


def failed(document):
    return [(f["claim"], f["measured"]) for f in document["findings"] if f["verdict"] == "fail"]


def claims(document, text):
    return [f for f in document["findings"] if text in f["claim"]]


def test_two_ranks_equal_one_device_and_the_findings_are_written(small, tmp_path):
    document = verify_equal(small(), 2, steps=3, out=tmp_path / "new" / "folder", command="repeat me")
    assert document["verdict"] == "pass" and not failed(document)
    assert document["schema"] == "fourfold.verify.equal/1"
    assert 0.0 < document["worst_relative"] < 1e-12
    assert 0.0 < document["worst_relative_own_eps"] < 1e-10
    layout = document["layouts"][0]
    assert (layout["dp_replicate"], layout["zero"], layout["world"], layout["verdict"]) == (2, 0, 2, "pass")
    assert document["tensors"]["blocks.1.ffn.up.bias"].keys() == {"gradient", "parameter"}
    assert "head.weight" not in document["tensors"], "a tied weight counts once"
    assert claims(document, "unequally many")[0]["verdict"] == "pass"
    assert claims(document, "the kernels of fp32")[0]["kind"] == "open"
    assert claims(document, "every gradient")[0]["command"] == "repeat me"
    written = json.loads((tmp_path / "new" / "folder" / "findings" / "equal.json").read_text())
    assert written["findings"] == document["findings"] and written["verdict"] == "pass"


def test_one_rank_and_one_microbatch(small, tmp_path):
    document = verify_equal(
        small(*MLP, "batch.global_batch=4", "batch.micro_batch=4", "optimizer.clip_norm=0.0"),
        1,
        steps=2,
        out=tmp_path,
    )
    assert document["verdict"] == "pass"
    assert any("batch.micro_batch 4 -> 2" in change for change in document["changes"])
    assert any("optimizer.clip_norm 0 ->" in change for change in document["changes"])
    assert claims(document, "clipping acts")[0]["measured"].endswith("of 2")
    assert document["layouts"][0]["accumulation"] == 2


def test_classes_filler_rows_and_noise_at_the_end_of_a_kept_epoch(small, tmp_path):
    spec = small(
        *MLP,
        'model.task="classification"',
        "model.outputs=3",
        "data.samples=13",
        'data.last_batch="keep"',
        'data.transforms=[{kind="gaussian_noise", std=0.1}]',
        "batch.micro_batch=1",
    )
    document = verify_equal(spec, 2, steps=5, out=tmp_path)
    assert document["verdict"] == "pass", failed(document)
    assert document["layouts"][0]["accumulation"] == 4


OWN = (
    'model.kind="import"',
    'data.kind="synthetic"',
    "data.inputs=4",
    "data.outputs=1",
    'data.task="regression"',
    "data.samples=64",
)


def test_what_becomes_nan_late_fails_and_is_named_there(small, tmp_path):
    sets = (*OWN, 'model.target="tests.verify.own_model:late_nan"')
    document = verify_equal(small(*sets), 2, steps=4, out=tmp_path)
    assert document["verdict"] == "fail"
    assert document["first_deviation"]["step"] == 3, document["first_deviation"]


def test_an_own_model_with_parts_used_never_or_sometimes(small, tmp_path):
    sets = (*OWN, 'model.target="tests.verify.own_model:sometimes"', "layout.unused_parameters=true")
    document = verify_equal(small(*sets), 2, steps=3, out=tmp_path)
    assert document["verdict"] == "pass", failed(document)
    assert document["tensors"]["never.weight"] == {"parameter": 0.0}
    assert "gradient" in document["tensors"]["rare.weight"]


def test_a_single_microbatch_of_one_sample_is_said_to_prove_less(small, tmp_path):
    document = verify_equal(
        small(*MLP, "batch.global_batch=2", "batch.micro_batch=1"), 2, steps=2, out=tmp_path
    )
    assert document["verdict"] == "pass", failed(document)
    accumulation = claims(document, "accumulation")[0]
    assert accumulation["kind"] == "open" and "batch.global_batch=4" in accumulation["would_test"]


def test_requests_that_cannot_be_judged(small, tmp_path):
    with pytest.raises(SpecError, match="--steps 0"):
        verify_equal(small(), 2, steps=0, out=tmp_path)
    with pytest.raises(SpecError):
        verify_equal(small(), 3, out=tmp_path)  # 8 samples do not divide over 3 ranks
    with pytest.raises(SpecError, match="pp"):
        verify_equal(small("layout.pp=4"), 4, out=tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_what_ranks_refuse_is_no_failed_check(spec_file, tmp_path):
    own = ('model.kind="import"', 'model.target="tests.verify.faults.kinds_models:Regression"')
    data = ('data.kind="synthetic"', 'data.task="regression"', "data.inputs=4", "data.outputs=1")
    spec = load_spec(str(spec_file), (*own, *data, "data.samples=64", "layout.tp=2")).spec
    with pytest.raises(SpecError) as refused:
        verify_equal(spec, 2, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == [], "a refused check leaves no folder of its own"
    (problem,) = refused.value.problems
    assert problem.asked == "layout.tp = 2" and "cuts nothing" in problem.found
    assert "--set layout.tp=1" in problem.instead


def test_the_mask_is_a_tail_and_belongs_to_the_sample():
    valid = np.ones(100, dtype=np.bool_)
    counts = [int(masked(valid, sample, 0).sum()) for sample in range(400)]
    assert all(masked(valid, s, 0)[: counts[s]].all() for s in range(400))
    assert 20 < sum(count == 0 for count in counts) < 90, "about an eighth has no target left"
    assert len(set(counts)) > 50
    assert masked(valid, 7, 0).tolist() == masked(valid, 7, 0).tolist()
    assert any(masked(valid, s, 0).sum() != masked(valid, s, 1).sum() for s in range(10))
    assert valid.all(), "the source's own array is left alone"
    single = {bool(masked(np.array(True), sample, 0)) for sample in range(50)}
    assert single == {True, False}


def test_a_salt_gives_every_step_unequal_ranks_and_a_masked_row(small):
    spec, _ = sharpened(settle(small(), 2))
    source = open_sources(spec).train
    schedule = batch_schedule(spec, len(source), 2)
    uneven = UnevenSource(source, choose_salt(source, schedule, 4))
    for step in range(4):
        counts = [int(uneven.sample(i).valid.sum()) for i in schedule.global_ids(step).tolist()]
        by_rank = valid_by_rank(counts, schedule)
        assert sum(by_rank) == sum(counts) > 0
        assert by_rank[0] != by_rank[1]
        assert min(counts) == 0


def test_a_rank_that_raises_is_a_failed_finding_with_its_own_words(small, tmp_path):
    document = verify_equal(
        small(*MLP), 2, steps=2, out=tmp_path, setup="tests.verify.test_equal:break_opening"
    )
    assert document["verdict"] == "fail"
    assert "rank 0" in claims(document, "every rank runs")[0]["measured"]
    assert "no such model" in claims(document, "every rank runs")[0]["measured"]
    assert document["first_deviation"] is None and not claims(document, "first deviating")
    assert document["worst_relative"] == float("inf"), "nothing was compared"


def break_opening():
    from fourfold.train import setup

    def kit_for(_spec):
        raise RuntimeError("no such model")

    setup.kit_for = kit_for
