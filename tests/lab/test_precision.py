from __future__ import annotations

import json

import pytest

from fourfold.cli.lab_precision import precision_lines
from fourfold.lab import precision_mistakes
from fourfold.lab.precision import RUNS, lab_precision
from fourfold.lab.precision_exercise import Lab, Shown
from fourfold.record.reader import RunReader

pytestmark = pytest.mark.timeout(300)
MISTAKES = ["clip-before-unscale", "half-everything", "each-rank-alone"]


@pytest.fixture(scope="module")
def story():
    return []


@pytest.fixture(scope="module")
def document(tmp_path_factory, story):
    return lab_precision(out=tmp_path_factory.mktemp("lab"), say=story.append)


def run(document, name):
    return next(each for each in document["runs"] if each["name"] == name)


def test_each_precision_does_what_it_is_for_and_every_mistake_is_caught(document, story):
    assert (document["schema"], document["verdict"]) == ("fourfold.lab.precision/1", "pass")
    assert [each["name"] for each in document["runs"]] == list(RUNS)
    assert [each["name"] for each in document["mistakes"]] == MISTAKES
    assert {each["verdict"] for each in document["mistakes"]} == {"pass"}
    assert [f["verdict"] for f in document["findings"] if f["verdict"] != "pass"] == ["open"]
    assert len(story) == len(RUNS) + len(MISTAKES)
    with open(document["findings_file"]) as file:
        assert json.load(file)["findings"] == document["findings"]


def test_losses_scales_and_skips_are_those_of_the_record(document):
    for each in document["runs"]:
        lines = list(RunReader(f"{document['folder']}/{each['name']}").metrics())
        assert each["losses"] == [line["loss"] for line in lines] and len(lines) == document["steps"]
        assert each["skipped_steps"] == [line["step"] for line in lines if line.get("skipped")]
    fp16 = run(document, "fp16")
    assert fp16["scales"][:9] == [2.0**16] * 8 + [2.0**17]
    (skipped, *_) = fp16["skipped_steps"]
    assert fp16["scales"][skipped] == fp16["scales"][skipped - 1] / 2
    assert run(document, "fp16-unscaled")["scales"] == [1.0] * document["steps"]


def test_bytes_are_counted_by_what_they_are_for(document):
    for each in document["runs"]:
        assert each["bytes"]["moments"] == 2 * each["bytes"]["parameters"]
        assert each["bytes"]["parameters"] % 4 == 0
        assert each["tokens_per_s"] > 0


def test_it_prints_within_80_columns(document):
    text = precision_lines(document)
    assert max(map(len, text[:-2])) <= 80
    assert sum(line == " -> caught" for line in text) == len(MISTAKES)
    assert any(line.startswith("not tested: bf16 and fp16 are faster") for line in text)
    fp16 = run(document, "fp16")
    skipped = ", ".join(f"step {step}" for step in fp16["skipped_steps"])
    (scales,) = [line for line in text if line.startswith("fp16, scaled") and line.endswith(f"  {skipped}")]
    assert scales.split()[2:5] == ["65,536", f"{max(fp16['scales']):,.0f}", f"{fp16['scales'][-1]:,.0f}"]
    told = " ".join(" ".join(text).split())
    assert "loss in steps 1, 10, 20: 5." in told  # no loss without the step it belongs to
    assert "loss scale 65,536 in step 4, 32,768 in step 6" in told
    assert "asked for one loss scale on all ranks in step 4" in told


def test_a_product_that_checks_nothing_fails_the_exercises(tmp_path, monkeypatch):
    monkeypatch.setattr(precision_mistakes, "STEPS", 12)  # one more than the mistake takes to ruin the loss
    lab = Lab(tmp_path, "tests.lab.precision_faults:no_checks", "")
    try:
        shown = [exercise(lab) for exercise in precision_mistakes.EXERCISES[:2]]
    finally:
        lab.close()
    assert [[finding.verdict for finding in each.findings] for each in shown] == [["pass", "fail"]] * 2
    assert all(each.fourfold[0].endswith("trains to the end, without a word") for each in shown)


def test_another_error_than_the_one_expected_is_no_pass(tmp_path):
    lab, shown = Lab(tmp_path, None, ""), Shown("control", "", "")
    try:
        lab.refused(
            shown, lab.plan(1, "precision.compute=fp16", "run.steps=1"), "half-everything", "something else"
        )
    finally:
        lab.close()
    assert [finding.verdict for finding in shown.findings] == ["fail"]
    assert "torch.float16 in" in shown.findings[0].measured
