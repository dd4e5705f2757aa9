"""Runs whose parameters are cut between ranks: they go on bit for bit on the same layout, and say what they cannot."""

from __future__ import annotations

import pytest

from fourfold.checkpoint.validate import read_manifest
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import DataError
from fourfold.train.replay import replay
from tests.train import rank_jobs
from tests.train.cut_jobs import held_after_loading
from tests.train.saver_jobs import checkpoints, live, newest, signalled, stored, written

DECODER = (
    'model={kind="decoder", layers=2, width=16, heads=4, kv_heads=2, ffn_width=33, biases=true, dropout=0.1}',
    "data.sequence=15",
    *("batch.global_batch=4", "batch.micro_batch=1", "optimizer.warmup_steps=0"),
    *("run.steps=5", "run.log_every=1", "run.validate_every=2", "run.validation_batches=1"),
    "checkpoint.every=2",
)
EVEN = "model.ffn_width=32"
LAYOUTS = [
    (2, ("layout.zero=3",)),
    (2, ("layout.tp=2", "layout.sp=true", EVEN)),
]
MORE = [
    (2, ("layout.zero=1",)),
    (2, ("layout.zero=2", "model.tied=true")),
    (2, ("layout.tp=2", EVEN, "model.tied=true")),
    (4, ("layout.zero=3", "layout.dp_replicate=2", "layout.dp_shard=2")),
    (4, ("layout.zero=2", "layout.dp_shard=2", "layout.tp=2", "layout.sp=true", EVEN)),
]


@pytest.mark.parametrize(
    ("world", "layout"),
    [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE)],
    ids=[" ".join(sets) for _, sets in (*LAYOUTS, *MORE)],
)
def test_a_stopped_run_goes_on_as_the_undisturbed_one(ranks, tmp_path, world, layout):
    """Of a cut with padding, too: 33 rows on two ranks are 17 and 16."""
    sets = (*DECODER, *layout)
    assert set(ranks(world).run(live, str(tmp_path / "undisturbed"), sets)) == {"finished"}
    told = ranks(world).run(signalled, str(tmp_path / "run"), sets, (3, "data"))
    assert {ending for ending, _ in told} == {"stopped"}
    assert checkpoints(tmp_path / "run") == [2, 3]
    saved = newest(tmp_path / "run")
    assert max(len(tensor.chunks) for tensor in read_manifest(saved).tensors.values()) > 1, "nothing was cut"
    assert set(ranks(world).run(live, str(tmp_path / "run"), sets, str(saved))) == {"finished"}
    assert stored(newest(tmp_path / "run")) == stored(newest(tmp_path / "undisturbed"))
    assert sorted(written(tmp_path / "run")) == sorted(written(tmp_path / "undisturbed"))


@pytest.mark.parametrize("layout", [("layout.zero=1",), ("layout.zero=3",), ("layout.tp=2", EVEN)])
def test_what_is_loaded_is_what_is_computed_and_updated(ranks, tmp_path, layout):
    """What the optimizer updates and what the model computes with are one memory, before and after a forward."""
    sets = (*DECODER, *layout, "run.steps=2")
    ranks(2).run(live, str(tmp_path), sets)
    for differing in ranks(2).run(
        held_after_loading, (*sets, f'run.dir="{tmp_path}"'), str(newest(tmp_path))
    ):
        assert differing == []


def test_another_layout_of_the_same_world_is_refused_for_now(ranks, tmp_path):
    ranks(2).run(live, str(tmp_path), (*DECODER, "layout.zero=3", "run.steps=2"))
    for other in ("layout.zero=2", "layout.tp=2"):
        sets = (*DECODER, other, EVEN, "run.steps=2")
        for text in ranks(2).run(live, str(tmp_path / "other"), sets, str(newest(tmp_path))):
            assert text.startswith("exit 5")
            assert f"under {other.replace('=', ' = ')}" in text
            assert f"it was saved under {other.split('=')[0]} = " in text
            assert "why:" in text or "another run" in text


@pytest.mark.parametrize(
    ("layout", "cutting"), [(("layout.zero=3",), "layout.zero = 3"), (("layout.tp=2",), "layout.tp = 2")]
)
def test_a_bundle_of_parts_is_kept_and_says_that_it_cannot_be_replayed(ranks, tmp_path, layout, cutting):
    texts = ranks(2).run(rank_jobs.run_with_nan, str(tmp_path), *layout)
    assert "failure bundle" in texts[0]
    folder = min(RunDir(tmp_path).failures_dir.glob("step-000003-rank0"))
    with pytest.raises(DataError) as refused:
        replay(folder)
    [problem] = refused.value.problems
    assert "rank 0's part of" in problem.found
    assert problem.why.startswith(cutting)
    assert "--nproc 2 --resume auto" in problem.instead


def test_a_bundle_of_replicas_is_whole(ranks, tmp_path):
    ranks(2).run(rank_jobs.run_with_nan, str(tmp_path))
    assert replay(tmp_path / "failures" / "step-000003-rank0")["reproduced"]
