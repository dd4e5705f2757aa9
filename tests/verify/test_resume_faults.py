"""Classic mistakes of checkpoints and resumed runs, planted in the ranks: each changes what a run leaves, and the
shipped command catches it and names where it begins."""

from __future__ import annotations

import hashlib

import pytest

from fourfold.record.reader import read_lines
from fourfold.record.run_dir import RunDir
from fourfold.verify.resume import verify_resume

FAULTS = "tests.verify.faults.resume_faults"
MLP = ('model.kind="mlp"', "model.inputs=8", "model.dropout=0.2", 'data.kind="synthetic"', "data.samples=64")
OWN = (
    *('model.kind="import"', 'model.target="tests.verify.resume_models:Restless"'),
    *(
        'data.kind="synthetic"',
        "data.inputs=4",
        "data.outputs=1",
        'data.task="regression"',
        "data.samples=64",
    ),
    "layout.unused_parameters=true",
)
pytestmark = pytest.mark.timeout(300)  # a check is a dozen small pools, one after another

LOADED, REFUSED = "loading the checkpoint of step 2", "the load refuses it"

# fault -> parts of the finding that names the first deviation
CAUGHT = {
    "moments_not_restored": (LOADED, "moment optimizer.layers.0.", "all zeros: it was not put back"),
    "step_counter_reset": (LOADED, "step counter optimizer.", "0.0 in place of 2.0"),
    "a_parameter_not_loaded": (LOADED, "rank 0, parameter model.", "what a new run begins with", REFUSED),
    "streams_of_rank_0": (LOADED, "rank 1, random stream rank1.numpy", "it is that of rank 0"),
    "position_off_by_one": ("step 3, rank 0, sample ids", "those of step 4, rank 0"),
    "epoch_begun_anew": ("step 3, rank 0, sample ids", "those of step 1, rank 0"),
    "epoch_repeated_at_its_edge": (
        "at an epoch's edge: step 7, rank 0, sample ids",
        "those of step 1, rank 0",
    ),
    "only_the_remainder": ("step 7, rank 0, sample ids", "those of step 11, rank 0"),
    "rate_from_the_decayed_one": ("step 3, learning rate", "the rate of step 2", "applied twice"),
    "rate_stepped_by_every_rank": ("undisturbed: step 2, learning rate", "that of step 3"),
    "weights_saved_one_step_late": (REFUSED, "it was saved wrong"),
    "moments_saved_one_step_late": ("step 3, validation", "it was saved wrong"),
    "validation_left_out": ("no value",),
    "metrics_not_taken_back": ("no value",),
    "masks_of_a_new_run": ("step 3, loss", "something that it does not hold changes the run"),
}
CAUGHT_IN_OWN = {
    "running_mean_not_loaded": (LOADED, "model.norm.running_mean", "what a new run begins with", REFUSED),
    "batches_not_counted_on": (LOADED, "model.norm.num_batches_tracked", "0 in place of 4"),
    "streams_not_restored": (LOADED, "rank 0, random stream rank0.torch", "what a new run begins with"),
}

# Every kind has a quick one: state, streams, position, an epoch's edge, rate, time of saving, record, own state.
LONG = {
    "step_counter_reset",
    "epoch_begun_anew",
    "epoch_repeated_at_its_edge",
    "rate_from_the_decayed_one",
    "weights_saved_one_step_late",
    "validation_left_out",
    "batches_not_counted_on",
}


def quick_or_long(faults):
    return [pytest.param(each, marks=pytest.mark.long) if each in LONG else each for each in faults]


@pytest.fixture(scope="module")
def clean(small, tmp_path_factory):
    """For each model the document of a check without a fault, and what its runs left, checkpoints too."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.verify.resume.shutil.rmtree", lambda *_args, **_more: None)
        for sets in (MLP, OWN):
            out = tmp_path_factory.mktemp("clean")
            found[sets] = verify_resume(small(*sets), 2, out=out), bits(out)
    return found


def bits(out):
    """For each run of a check a digest of what its ranks wrote down, and of every tensor that was saved."""
    found = {}
    for run in map(RunDir, (out / "resume-1").iterdir()):
        digest = hashlib.blake2b()
        for rank in (0, 1):
            steps = [
                (e["step"], e["sample_ids"]) for e in read_lines(run.events(rank)) if e["kind"] == "step"
            ]
            digest.update(repr(steps).encode())
        names = ("step", "loss", "grad_norm", "lr", "validation_loss")
        lines = [[line.get(name) for name in names] for line in read_lines(run.metrics)]
        digest.update(repr(lines).encode())
        for shard in sorted(run.checkpoints.glob("step-*/*.safetensors")):
            digest.update(f"{shard.parent.name}/{shard.name}".encode() + shard.read_bytes())
        found[run.path.name] = digest.hexdigest()
    return found


def caught(verb, out, clean, fault, sets, parts):
    """The fault changes bits; the command says so, and names where it begins."""
    code, document = verb("resume", fault=f"{FAULTS}:{fault}", sets=sets)
    assert (code, document["verdict"]) == (3, "fail")
    left = bits(out)
    assert any(left[run] != clean[sets][1][run] for run in left.keys() & clean[sets][1].keys())
    named = [f for f in document["findings"] if f["claim"].startswith("the first deviating value")]
    assert len(named) == 1
    for part in parts:
        assert part in named[0]["measured"], named[0]["measured"]


@pytest.mark.parametrize("sets", [MLP, OWN], ids=["mlp", "own model"])
def test_a_run_without_a_fault_passes(clean, score, sets):
    document, left = clean[sets]
    score[f"clean {len(sets)}"] = document["verdict"] == "pass"
    assert document["verdict"] == "pass"
    assert document["first_deviation"] is None
    assert left.keys() == {"undisturbed", *(one["name"] for one in document["scenarios"])}


@pytest.mark.parametrize("fault", quick_or_long(CAUGHT))
def test_a_fault_is_caught_and_its_beginning_named(verb, score, clean, tmp_path, fault):
    score[fault] = False
    caught(verb, tmp_path / "out", clean, fault, MLP, CAUGHT[fault])
    score[fault] = True


@pytest.mark.parametrize("fault", quick_or_long(CAUGHT_IN_OWN))
def test_a_fault_in_what_a_user_brings_along_is_caught(verb, score, clean, tmp_path, fault):
    score[fault] = False
    caught(verb, tmp_path / "out", clean, fault, OWN, CAUGHT_IN_OWN[fault])
    score[fault] = True
