"""`fourfold train --smoke`: a right Spec passes; a fault in saving, loading or reading on fails it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fourfold.lab.smoke import STEPS, smoke_spec
from fourfold.record.reader import read_lines
from fourfold.record.run_dir import RunDir
from fourfold.spec.load import load_spec
from fourfold.spec.rules import require
from tests.train.rank_jobs import SMALLEST

FOURFOLD = (sys.executable, "-m", "fourfold", "train", "tiny", "--nproc", "2", "--smoke")
OWN = (
    'model={kind="import", target="tests.verify.own_model:late_nan"}',
    'data={kind="synthetic", samples=64, inputs=4, outputs=1, task="regression"}',
)
pytestmark = pytest.mark.timeout(180)


def smoke(folder, *sets):
    """Exit code, document and story of the command in a folder of its own."""
    run = f"run.dir={json.dumps(str(folder / 'run'))}"
    words = [word for setting in (*sets, run) for word in ("--set", setting)]
    done = subprocess.run([*FOURFOLD, *words, "--json"], capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def failed(document):
    return [finding for finding in document["findings"] if finding["verdict"] == "fail"]


def test_tiny_passes_in_a_run_directory_of_its_own(tmp_path):
    done = subprocess.run(
        [*FOURFOLD, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["schema"], document["verdict"]) == ("fourfold.smoke/1", "pass")
    assert document["run"] == "runs/tiny-smoke-1"
    claims = {finding["claim"] for finding in document["findings"]}
    assert "resumed after step 2: every tensor of every checkpoint, its position and its probe loss" in claims
    assert "this run: no sample comes twice in the epoch as far as it was read" in claims
    assert done.stderr.endswith("next: fourfold train tiny --nproc 2\n")
    run = RunDir(tmp_path / document["run"])
    joined = [line for line in read_lines(run.events(0)) if line["kind"] == "joined"]
    assert len({line["pid"] for line in joined}) == 2, "fresh processes"
    assert sorted(folder.name for folder in run.checkpoints.iterdir()) == ["step-00000002", "step-00000003"]
    assert all((tmp_path / file).exists() for file in document["findings_files"])


@pytest.mark.parametrize(
    ("fault", "begins"),
    [
        ("moments_not_restored", "step 3, parameter model."),
        pytest.param("rate_from_the_decayed_one", "step 3, learning rate", marks=pytest.mark.long),
    ],
)
def test_a_run_that_does_not_go_on_as_it_was_fails(tmp_path, fault, begins):
    transform = f'data.transforms=[{{kind="import", target="tests.lab.smoke_faults:{fault}"}}]'
    code, document, story = smoke(tmp_path, *SMALLEST, transform)
    assert (code, document["verdict"]) == (3, "fail"), story
    assert document["first_deviation"]["step"] == 3
    named = next(f for f in failed(document) if f["claim"].startswith("the first deviating value"))
    assert named["measured"].startswith(f"resumed after step 2: {begins}")
    assert all(finding["claim"] in story for finding in failed(document))
    assert (tmp_path / "run/undisturbed/ckpt/step-00000003").is_dir(), "kept, to look at"


@pytest.mark.long
def test_a_checkpoint_that_is_not_loaded_whole_fails(tmp_path):
    fault = 'data.transforms=[{kind="import", target="tests.lab.smoke_faults:a_parameter_not_loaded"}]'
    code, document, story = smoke(tmp_path, *SMALLEST, fault)
    assert (code, document["verdict"]) == (3, "fail"), story
    named = {finding["claim"]: finding["measured"] for finding in failed(document)}
    assert "the loss of step 2's batch" in named["resumed after step 2: every life ends as planned"]


def test_ranks_that_fail_are_a_failed_finding(tmp_path):
    code, document, story = smoke(tmp_path, *OWN)
    assert (code, document["verdict"]) == (3, "fail"), story
    assert "undisturbed: every life ends as planned" in {finding["claim"] for finding in failed(document)}
    assert any("failed at step 3" in finding["measured"] for finding in failed(document))
    assert "2/3  from" not in story, "there is nothing to resume"


def test_a_signal_ends_it_and_nothing_is_claimed(tmp_path):
    words = [word for setting in SMALLEST for word in ("--set", setting)]
    with subprocess.Popen(
        [*FOURFOLD, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("2/3  from"):
                process.terminate()
                break
        out, story = process.communicate(timeout=90)
    assert process.returncode == 128 + 15, story
    assert "stopped by a signal: the smoke test has shown nothing" in story
    assert out == ""
    assert not (tmp_path / "runs/tiny-smoke-1/findings").exists()


def test_only_length_and_watching_are_changed():
    loaded = load_spec("tiny", ["optimizer.schedule=wsd", "optimizer.decay_steps=50", "run.dir=mine"])
    short, changes = smoke_spec(loaded)
    require(short.spec, "train")
    assert (short.spec.run.steps, short.spec.run.dir, short.spec.name) == (STEPS, "mine", "tiny-smoke")
    assert (short.spec.optimizer.warmup_steps, short.spec.optimizer.decay_steps) == (1, 1)
    for section in ("model", "data", "batch", "layout", "precision", "hardware"):
        assert getattr(short.spec, section) == getattr(loaded.spec, section)
    assert "run.steps 200 -> 3" in changes and "checkpoint.every 0 -> 2" in changes


def test_what_is_short_already_is_left_alone():
    _, changes = smoke_spec(load_spec("tiny", ["run.steps=3"]))
    assert not [change for change in changes if change.startswith(("run.steps", "optimizer"))]
