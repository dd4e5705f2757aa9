from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file

from fourfold.checkpoint.choose import Choice, look, newest_valid
from fourfold.checkpoint.validate import read_manifest, validate
from fourfold.cli.lab import resume_lines
from fourfold.lab import resume, resume_mistakes
from fourfold.lab.resume import EXERCISES, lab_resume
from fourfold.lab.resume_exercise import Lab, Shown
from fourfold.plan.run_plan import RunPlan
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import RankFailed
from fourfold.verify.coverage import run_coverage

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def story():
    return []


@pytest.fixture(scope="module")
def document(tmp_path_factory, story):
    return lab_resume(out=tmp_path_factory.mktemp("lab"), say=story.append)


@pytest.fixture
def runs(document):
    """`runs(name)` is the run directory of an exercise."""
    return lambda name: RunDir(RunDir(document["runs"]).path / name)


@pytest.fixture
def lab(runs):
    """The same start again, for an exercise of a test's own."""
    plan = RunPlan.model_validate_json(runs("undisturbed").plan_json.read_text())
    return Lab(plan, runs("undisturbed").path.parent, runs("undisturbed"), [], None, "")


def entry(document, name):
    return next(each for each in document["exercises"] if each["name"] == name)


def checkpoint(run, step):
    return run.checkpoints / f"step-{step:08d}"


def tensors(folder):
    """Every tensor of a checkpoint, as its bytes, by the safetensors package."""
    held = {}
    for file in folder.glob("*.safetensors"):
        held |= {name: array.tobytes() for name, array in load_file(file).items()}
    return held


def lines(run):
    read = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return {line["step"]: line for line in read}


def ids(run):
    """[(step, sample id)] of both ranks."""
    events = [json.loads(line) for rank in (0, 1) for line in run.events(rank).read_text().splitlines()]
    return [(each["step"], one) for each in events if each["kind"] == "step" for one in each["sample_ids"]]


def test_the_right_way_is_the_same_run_and_every_mistake_is_caught(document, story):
    assert (document["schema"], document["verdict"]) == ("fourfold.lab.resume/1", "pass")
    assert [each["name"] for each in document["exercises"]] == [
        "right", "weights-only", "position-lost", "seed-reset", "one-file", "mark-first", "damaged-shard",
    ]  # fmt: skip
    assert {each["verdict"] for each in (*document["exercises"], *document["findings"])} == {"pass"}
    assert len(story) == 8
    with open(document["findings_file"]) as file:
        assert json.load(file)["findings"] == document["findings"]


def test_the_right_way_is_bitwise_the_undisturbed_run(document, runs):
    rows = entry(document, "right")["rows"]
    assert [row["step"] for row in rows] == list(range(11, 21))
    assert all(row["undisturbed"] == row["resumed"] and row["difference"] == 0 for row in rows)
    one, other = runs("undisturbed"), runs("right")
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in lines(one).values()] == [line[key] for line in lines(other).values()]
    # It moves: up to its height in step 15, where step 16 still has it, then down.
    assert len({line["lr"] for line in lines(one).values()}) == 19
    assert sorted(ids(one)) == sorted(ids(other))
    before, after = tensors(checkpoint(one, 20)), tensors(checkpoint(other, 20))
    assert len(before) == 90
    assert before == after != tensors(checkpoint(one, 10))


def test_a_careless_trainer_with_a_whole_checkpoint_is_the_same_run_too(lab):
    """So that each mistake is the only cause of what comes of it; and a mistake without harm is no pass."""
    shown = Shown("control", "", "")
    lab.go_on_carelessly(shown, lab.interrupted("control", 10), 11)
    assert all(row.same for row in shown.rows) and len(shown.rows) == 10
    assert [finding.verdict for finding in shown.findings] == ["fail"]
    assert shown.findings[0].measured == "they do not differ"
    lab.refused(shown, lab.undisturbed, "missing")
    assert (shown.findings[1].verdict, shown.findings[1].measured) == ("fail", "it was loaded")


def test_weights_alone_give_the_same_loss_once(document, runs):
    found = entry(document, "weights-only")
    assert found["first_difference"] == 12
    assert all(row["difference"] > 0 and row["same_samples"] for row in found["rows"][1:])
    whole, part = tensors(checkpoint(runs("undisturbed"), 10)), tensors(checkpoint(runs("weights-only"), 10))
    assert part == {name: data for name, data in whole.items() if not name.startswith("optimizer.")}
    assert len(whole) - len(part) == 3 * 20, "two moments and a step of each of 20 parameters"
    assert (
        "exp_avg: missing from the checkpoint" in found["fourfold"][0] and "59 more" in found["fourfold"][0]
    )


def test_a_lost_position_gives_every_sample_of_the_first_steps_twice(document, runs):
    found = entry(document, "position-lost")
    assert found["first_difference"] == 11 and not any(row["same_samples"] for row in found["rows"])
    given = ids(runs("position-lost"))
    first, second = ([one for step, one in given if (step <= 10) == early] for early in (True, False))
    assert len(first) == len(set(first)) == 80 and sorted(first) == sorted(second)
    assert found["seen"][1].startswith("80 samples of steps 1-10 come again: ")
    assert run_coverage(runs("position-lost").path)["duplicates"] == 80
    assert "80 come before step 11" in found["fourfold"][1]


def test_a_seed_that_is_set_again_repeats_the_noise_on_each_rank(document, runs):
    found = entry(document, "seed-reset")
    assert found["first_difference"] == 11 and all(row["same_samples"] for row in found["rows"])
    assert "10 of 10 on rank 0, 10 of 10 on rank 1" in found["seen"][1]
    assert not [name for name in tensors(checkpoint(runs("seed-reset"), 10)) if name.startswith("rank")]
    assert "tensor rank0.numpy: missing" in found["fourfold"][0]


def test_one_file_keeps_one_rank(document, runs):
    found = entry(document, "one-file")
    assert found["first_difference"] == 11
    folder = checkpoint(runs("one-file"), 10)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "rank00000.safetensors", "state.json",
    ]  # fmt: skip
    owners = {name.partition(".")[0] for name in tensors(folder) if name.startswith("rank")}
    assert len(owners) == 1
    (lost,) = {"rank0", "rank1"} - owners
    named = [problem for problem in validate(folder) if f"has no {lost}." in problem.found]
    # The manifest has the hash of what rank 0 wrote: where rank 1 was the last to write, that is wrong, and of a file
    # that is known to be damaged no more is said.
    hashed = [problem for problem in validate(folder) if "its hash is" in problem.found]
    assert (len(named), len(hashed)) == ((5, 0) if owners == {"rank0"} else (0, 1))
    assert newest_valid(runs("one-file").checkpoints).path is None


def test_a_mark_before_the_shards_vouches_for_nothing(document, runs):
    theirs, ours = runs("mark-first").checkpoints, runs("mark-last").checkpoints
    assert (theirs / "latest").read_text() == "step-00000020"
    whole = {file.name: file.stat().st_size for file in checkpoint(runs("undisturbed"), 20).iterdir()}
    cut = {file.name: file.stat().st_size for file in checkpoint(runs("mark-first"), 20).iterdir()}
    assert cut and all(size <= whole[name] // 2 for name, size in cut.items())
    assert newest_valid(theirs).step == newest_valid(ours).step == 10
    (left,) = look(ours).saving
    assert "manifest.json" not in {file.name for file in left.iterdir()}
    assert entry(document, "mark-first")["rows"] == []


def test_a_damaged_shard_differs_in_one_bit_and_is_named(document, runs):
    found = entry(document, "damaged-shard")
    assert found["first_difference"] == 11 and all(row["difference"] > 0 for row in found["rows"])
    whole, damaged = (checkpoint(runs(name), 10) for name in ("undisturbed", "damaged-shard"))
    flipped = {}
    for file in whole.glob("*.safetensors"):
        pairs = zip(file.read_bytes(), (damaged / file.name).read_bytes(), strict=True)
        flipped[file.name] = sum((one ^ other).bit_count() for one, other in pairs)
    assert sorted(flipped.values()) == [0, 1]
    name = max(flipped, key=flipped.__getitem__)
    (problem,) = validate(damaged)
    assert problem.asked == name and "its hash is" in problem.found
    assert found["fourfold"][0].startswith(f"passed over step-00000010: {name}: its hash is")
    assert found["fourfold"][1:] == [
        "goes on from step-00000005",
        "steps 11-20 from there: 0 of 10 differ from the undisturbed",
    ]
    again = runs("damaged-shard-passed-over")
    assert tensors(checkpoint(again, 20)) == tensors(checkpoint(runs("undisturbed"), 20))
    assert read_manifest(checkpoint(again, 10)).step == 10, "the step was saved again"


@pytest.mark.parametrize(("fault", "first"), [("moments_are_dropped", 12), ("streams_are_not_restored", 11)])
def test_a_load_that_loses_something_fails_the_exercise(monkeypatch, tmp_path, fault, first):
    monkeypatch.setattr(resume, "EXERCISES", EXERCISES[:1])
    document = lab_resume(out=tmp_path, setup=f"tests.lab.resume_faults:{fault}")
    assert document["verdict"] == "fail"
    assert document["exercises"][0]["first_difference"] == first
    assert [finding["verdict"] for finding in document["findings"]] == ["fail", "fail"]
    assert "NOT the same run" in "\n".join(resume_lines(document))


def test_a_load_that_fails_is_a_failed_finding(monkeypatch, tmp_path):
    monkeypatch.setattr(resume, "EXERCISES", EXERCISES[:1])
    document = lab_resume(out=tmp_path, setup="tests.lab.resume_faults:load_fails")
    assert document["verdict"] == "fail" and "no such luck" in document["findings"][0]["measured"]
    assert document["exercises"][0]["rows"] == []


def test_a_load_without_a_census_fails_the_exercise(monkeypatch, tmp_path):
    monkeypatch.setattr(resume, "EXERCISES", (resume_mistakes.weights_only,))
    document = lab_resume(out=tmp_path, setup="tests.lab.resume_faults:no_census")
    assert document["verdict"] == "fail"
    assert [finding["verdict"] for finding in document["findings"]] == ["pass", "fail"]
    assert entry(document, "weights-only")["fourfold"] == ["loads it, without a word"]


def test_a_choice_that_trusts_fails_the_exercise(monkeypatch, tmp_path):
    def trusting(ckpt_dir):
        newest = max(path for path in ckpt_dir.iterdir() if path.name.startswith("step-"))
        return Choice(newest, int(newest.name[5:]), ())

    monkeypatch.setattr(resume_mistakes, "newest_valid", trusting)
    monkeypatch.setattr(
        resume,
        "EXERCISES",
        (resume_mistakes.one_file, resume_mistakes.mark_first, resume_mistakes.damaged_shard),
    )
    document = lab_resume(out=tmp_path)
    assert {each["name"]: each["verdict"] for each in document["exercises"]} == {
        "one-file": "fail", "mark-first": "fail", "damaged-shard": "fail",
    }  # fmt: skip


def test_killed_says_how_the_ranks_ended(lab):
    assert lab.killed(newest_valid, lab.undisturbed.checkpoints) == "in good order"
    with pytest.raises(RankFailed):
        lab.in_ranks(read_manifest, lab.folder)


def test_it_prints_within_80_columns(document):
    text = resume_lines(document)
    assert max(map(len, text[:-2])) <= 80
    assert sum(line == " -> caught" for line in text) == 6
    assert sum(line.startswith(" step ") for line in text) == 6
    assert sum(line.endswith("0  same") for line in text) == 11, "all steps of the right way, and one more"
