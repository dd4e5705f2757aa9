"""A run that was killed or stopped goes on as the same run, on 1, 2 and 4 ranks; and what the check says of one that
does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.checkpoint.choose import Choice, newest_valid
from fourfold.checkpoint.manifest import MANIFEST
from fourfold.checkpoint.validate import read_manifest
from fourfold.launch.pool import RankPool
from fourfold.spec.errors import DataError, Problem, RankFailed, SpecError
from fourfold.spec.load import load_spec
from fourfold.verify.resume import verify_resume
from tests.train.rank_jobs import SMALLEST

OWN = (
    *('model.kind="import"', 'model.target="tests.verify.resume_models:Restless"', 'data.kind="synthetic"'),
    *("data.inputs=4", "data.outputs=1", 'data.task="regression"', "layout.unused_parameters=true"),
    *("batch.global_batch=8", "batch.micro_batch=2", "optimizer.warmup_steps=2", "data.samples=64"),
)
DRAWS = 'data.transforms=[{kind="import", target="tests.verify.resume_models:jitter"}]'

pytestmark = pytest.mark.timeout(300)  # a check is a dozen small pools, one after another


def smallest(*sets):
    return load_spec("tiny", [*SMALLEST, "data.samples=64", *sets]).spec


def failed(document):
    return [f"{f['claim']}: {f['measured']}" for f in document["findings"] if f["verdict"] == "fail"]


def finding(document, *parts):
    return next(f for f in document["findings"] if all(part in f["claim"] for part in parts))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_goes_on_as_the_same_run(tmp_path, world):
    told: list[str] = []
    spec = smallest("model.dropout=0.2", 'data.last_batch="keep"')
    document = verify_resume(spec, world, out=tmp_path / "new" / "out", command="repeat me", say=told.append)
    assert document["verdict"] == "pass", failed(document)
    assert document["schema"] == "fourfold.verify.resume/1"
    assert (document["world"], document["steps"], document["steps_per_epoch"]) == (world, 13, 6)
    twice, edge, stopped = document["scenarios"]
    assert (twice["continued_from"], edge["continued_from"], stopped["continued_from"]) == (
        [2, 4],
        [6],
        [9, 12],
    )
    assert (twice["workers"], edge["workers"], stopped["workers"]) == (0, 2, 0)
    assert [one["signal"] for one in stopped["interruptions"]] == ["SIGTERM", "SIGKILL"]
    assert all(one["rank"] == world - 1 for one in twice["interruptions"])
    assert "run.steps 4 -> 13" in document["changes"]
    assert finding(document, "killed at", "committed")["measured"].endswith("was not taken for one")
    assert finding(document, "stopped", "its metrics read")["measured"] == "18 lines, each once and in order"
    assert {f["command"] for f in document["findings"]} == {"repeat me"}
    assert len(told) == 4 and "SIGKILL in step 4 (backward)" in told[1]
    written = json.loads(Path(document["findings_file"]).read_text())
    assert written["findings"] == document["findings"] and written["verdict"] == "pass"
    for entry in document["findings"]:
        assert not entry["evidence"] or (tmp_path / "new" / "out" / entry["evidence"]).exists(), entry
    assert not list((tmp_path / "new" / "out").rglob("*.safetensors")), (
        "checkpoints stay where a check failed only"
    )


DECODER = (
    'model={kind="decoder", layers=2, width=16, heads=4, kv_heads=2, ffn_width=32, tied=true, dropout=0.1}',
    *("data.sequence=15", "batch.global_batch=4", "batch.micro_batch=1", "optimizer.warmup_steps=2"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        *((2, (f"layout.zero={stage}",)) for stage in (1, 2, 3)),
        *((2, ("layout.tp=2", f"layout.sp={sp}")) for sp in ("false", "true")),
        (4, ("layout.zero=3", "layout.dp_replicate=2", "layout.dp_shard=2")),
    ],
)
def test_a_run_that_is_cut_between_ranks_goes_on_as_the_same_run(tmp_path, world, layout):
    spec = load_spec("tiny", [*DECODER, *layout]).spec
    document = verify_resume(spec, world, out=tmp_path)
    assert document["verdict"] == "pass", failed(document)


@pytest.mark.long
def test_a_decoder_with_documents_tied_weights_and_dropout_goes_on_as_the_same_run(small, tmp_path):
    document = verify_resume(small(), 2, out=tmp_path)
    assert document["verdict"] == "pass", failed(document)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_decoder_on_four_ranks_goes_on_as_the_same_run(tmp_path, precision):
    spec = load_spec("tiny", [f'precision.compute="{precision}"', "data.sequence=32"]).spec
    document = verify_resume(spec, 4, out=tmp_path)
    assert document["verdict"] == "pass", failed(document)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_users_model_and_transform_that_draw_from_the_processes_streams(tmp_path, world):
    document = verify_resume(load_spec("tiny", [*OWN, DRAWS]).spec, world, out=tmp_path)
    assert document["verdict"] == "pass", failed(document)
    assert document["scenarios"][1]["workers"] == 2


def test_without_a_validation_set_there_is_none_to_be_killed_in(tmp_path):
    spec = smallest("data.validation_fraction=0.0", 'optimizer.schedule="constant"')
    document = verify_resume(spec, 1, out=tmp_path)
    assert document["verdict"] == "pass", failed(document)
    assert document["scenarios"][2]["continued_from"] == [9]
    assert not any("every validation" in f["claim"] for f in document["findings"])
    assert finding(document, "a learning rate that goes on")["kind"] == "open"


def test_an_epoch_of_two_steps_proves_less_and_says_so(tmp_path):
    document = verify_resume(smallest("data.samples=18"), 1, out=tmp_path)
    assert document["verdict"] == "pass", failed(document)
    assert document["steps_per_epoch"] == 2
    assert finding(document, "killed twice inside one epoch")["kind"] == "open"


def test_an_older_checkpoint_is_bitwise_right_and_still_a_lost_step(tmp_path, monkeypatch):
    def oldest(ckpt_dir):
        choice = newest_valid(ckpt_dir)
        first = min(ckpt_dir.glob("step-*"))
        return Choice(first, read_manifest(first).step, choice.passed_over)

    monkeypatch.setattr("fourfold.train.resume.newest_valid", oldest)
    document = verify_resume(smallest(), 1, out=tmp_path)
    assert document["verdict"] == "fail"
    lost = finding(document, "no committed step is lost")
    assert lost["verdict"] == "fail" and "from step 2, published up to 4" in lost["measured"]


def test_an_unfinished_save_that_is_taken_for_a_checkpoint_is_caught(tmp_path, monkeypatch):
    def by_step(ckpt_dir):
        found = max(ckpt_dir.iterdir(), key=lambda folder: read_manifest(folder).step)
        return Choice(found, read_manifest(found).step, ())

    monkeypatch.setattr("fourfold.train.resume.newest_valid", by_step)
    document = verify_resume(smallest(), 1, out=tmp_path)
    assert [one["verdict"] for one in document["scenarios"]] == ["pass", "fail"]
    lost = finding(document, "killed at an epoch's edge", "no committed step is lost")
    assert lost["verdict"] == "fail" and "from step 8, published up to 6" in lost["measured"]
    assert finding(document, "a run stopped by a signal")["verdict"] == "open"


def test_a_run_that_cannot_go_on_is_a_failed_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fourfold.train.resume.newest_valid",
        lambda folder: Choice(None, None, newest_valid(folder).passed_over),
    )
    document = verify_resume(smallest(), 1, out=tmp_path)
    assert document["verdict"] == "fail"
    assert any("it cannot go on: go on with" in text for text in failed(document)), failed(document)
    assert list(tmp_path.rglob(MANIFEST)), "what a failed check left can be looked at"


def test_a_model_that_fails_ends_the_check_with_its_error(tmp_path):
    spec = load_spec("tiny", [*OWN, 'model.target="tests.verify.own_model:late_nan"']).spec
    document = verify_resume(spec, 1, out=tmp_path)
    assert document["verdict"] == "fail" and document["scenarios"] == []
    assert any("a finite loss and gradient in step 3" in text for text in failed(document)), failed(document)


def test_what_the_ranks_refuse_is_no_failed_check_and_leaves_nothing(tmp_path):
    target = 'model.target="tests.verify.faults.kinds_models:Regression"'
    spec = load_spec("tiny", [*OWN, target, "layout.tp=2"]).spec
    tmp_path.joinpath("stood").mkdir()
    for out, left in ((tmp_path / "new", ["stood"]), (tmp_path / "stood", ["stood"])):
        with pytest.raises(SpecError) as refused:
            verify_resume(spec, 2, out=out)
        (problem,) = refused.value.problems
        assert problem.asked == "layout.tp = 2" and "cuts nothing" in problem.found
        assert "--set layout.tp=1" in problem.instead
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == left


def test_a_run_that_never_repeats_is_told_from_one_that_does_not_go_on(tmp_path):
    spec = load_spec("tiny", [*OWN, 'model.target="tests.verify.resume_models:Moody"']).spec
    document = verify_resume(spec, 1, out=tmp_path)
    assert document["verdict"] == "fail"
    assert finding(document, "two undisturbed runs are the same")["verdict"] == "fail"
    assert document["first_deviation"]["life"] == 0
    assert "began before any interruption" in finding(document, "first deviating")["measured"]


@pytest.mark.parametrize(
    ("otherwise", "said"),
    [("hangs", "rank 0 hung"), ("goes on", "finished where SIGKILL in step 4 (backward) was planned")],
)
def test_a_life_that_ends_otherwise_than_planned_is_no_kill(tmp_path, monkeypatch, otherwise, said):
    class Pool(RankPool):
        def run(self, function, plan, samples, interruption):
            if interruption is not None and otherwise == "hangs":
                raise RankFailed(
                    Problem("a job", "rank 0 hung: no answer", "", ""), rank=0, exit_code=128 + 9
                )
            return super().run(function, plan, samples, None)

    monkeypatch.setattr("fourfold.verify.resume.RankPool", Pool)
    document = verify_resume(smallest(), 1, out=tmp_path)
    ends = finding(document, "killed twice", "every life ends as planned")
    assert ends["verdict"] == "fail" and said in ends["measured"]


def test_requests_that_cannot_be_checked(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(SpecError):
        verify_resume(smallest(), 3, out=out)  # 8 samples do not divide over 3 ranks
    with pytest.raises(SpecError, match="pp"):
        verify_resume(smallest("layout.pp=4", "model.layers=2"), 4, out=out)
    with pytest.raises(DataError, match="fewer than one global batch"):
        verify_resume(smallest("data.samples=4"), 1, out=out)
    assert not out.exists(), "nothing was written"
    out.write_text("a file")
    with pytest.raises(DataError, match="make the folder"):
        verify_resume(smallest(), 1, out=out)
