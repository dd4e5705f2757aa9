from __future__ import annotations

import json

import pytest

from tests.train import rank_jobs

TINIEST = (
    "model.layers=1",
    "model.width=8",
    "model.heads=1",
    "model.kv_heads=1",
    "model.dropout=0.5",
    'data.kind="jsonl"',
    "data.sequence=16",
    'data.packing="pad"',
    "data.validation_fraction=0.3",
    "batch.global_batch=8",
    "batch.micro_batch=2",
)


@pytest.fixture
def text(tmp_path):
    """Documents of many lengths, so that rows are padded and ranks have unequally many targets."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": "abc " * (1 + i % 7)}) + "\n" for i in range(40)))
    return f"data.path={json.dumps(str(path))}"


def test_validation_is_the_mean_over_all_its_targets_without_dropout(ranks, text):
    for seen in ranks(2).run(rank_jobs.validation, *TINIEST, text, 'precision.compute="fp64"'):
        assert seen["loss"] == pytest.approx(seen["by_hand"], rel=1e-12)
        assert (seen["targets"], seen["samples"]) == (seen["targets_by_hand"], seen["all_samples"])
        assert seen["samples"] % 4  # the last batches hold filler rows
        assert seen["training_again"]
        assert seen["phases"] == {(4, "validation")}  # a long one is seen to be alive


def test_a_model_of_ones_own_is_given_vectors_in_the_dtype_of_the_run(ranks):
    for seen in ranks(2).run(rank_jobs.validation, *rank_jobs.line()):
        assert seen["loss"] == pytest.approx(seen["by_hand"], rel=1e-12)


def test_a_limit_is_counted_in_global_batches(ranks, text):
    for seen in ranks(2).run(rank_jobs.validation, *TINIEST, text, "run.validation_batches=2"):
        assert seen["samples"] == 16 < seen["all_samples"]


def test_validation_computes_in_the_precision_of_the_run(ranks, text):
    wide, narrow = (
        ranks(2).run(rank_jobs.validation, *TINIEST, text, f'precision.compute="{compute}"')[0]["loss"]
        for compute in ("fp32", "bf16")
    )
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.05)
