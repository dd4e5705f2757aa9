from __future__ import annotations

import json

import pytest

from fourfold.cli.lab_pipeline import drawing, pipeline_lines
from fourfold.cli.main import main
from fourfold.lab.pipeline import _sharded_findings, lab_pipeline
from fourfold.spec.errors import SpecError
from fourfold.spec.schedules import SCHEDULES

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def story():
    return []


@pytest.fixture(scope="module")
def document(tmp_path_factory, story):
    return lab_pipeline(nproc=2, unit_s=0.01, out=tmp_path_factory.mktemp("lab"), say=story.append)


def entry(document, name):
    return next(one for one in document["schedules"] if one["name"] == name)


def test_every_schedule_is_drawn_and_runs_as_drawn(document, story):
    assert (document["schema"], document["verdict"]) == ("fourfold.lab.pipeline/1", "pass")
    assert [one["name"] for one in document["schedules"]] == list(SCHEDULES)
    for one in document["schedules"]:
        assert one["ran"]["same_order"] and one["ran"]["gradient_gap"] <= 1e-12
        assert one["ran"]["span"] >= one["figures"]["span"]  # a sleep is never short
        assert [row["microbatches"] for row in one["over_microbatches"]] == [2, 4, 8, 16]
    assert len(document["findings"]) == 6 and len(story) == len(SCHEDULES) + 1
    with open(document["findings_file"]) as file:
        assert json.load(file)["findings"] == document["findings"]


def test_the_figures_of_1f1b(document):
    figures = entry(document, "1f1b")["figures"]
    assert (figures["span"], figures["most_alive"]) == (15.0, [2.0, 1.0])
    assert figures["bubble"] == pytest.approx(1 / 5) and figures["bubble_by_formula"] == 1 / 5
    (first, *_, last) = entry(document, "1f1b")["timeline"][1]
    assert first == [1, "F", 0, 1.0, 2.0] and last == [1, "B", 3, 11.0, 13.0]


def test_zero_3_under_a_split_backward_is_silently_wrong(document):
    gaps = {(one["name"], one["dropped_after_forward"]): one["gap"] for one in document["sharded"]}
    assert len(gaps) == 2 * len(SCHEDULES)
    for (name, dropped), gap in gaps.items():
        assert (gap > 0.1) == (dropped and SCHEDULES[name].splits), (name, dropped, gap)


def test_it_prints_within_80_columns(document):
    text = pipeline_lines(document)
    assert max(map(len, text[:-1])) <= 80
    assert " rank 0  F0F1....B0--F2B1--F3B2--..B3--" in text
    assert " rank 1  ..F0B0--F1B1--F2B2--F3B3--...." in text
    told = " ".join(" ".join(text).split())
    assert "idle 20.0% of 15 units; by formula 20.0%" in told
    assert "0.0% between a rank's own first and last action" in told
    assert "each pass sleeps" in told and "No error, no warning" in told
    assert sum(line.endswith("as drawn") for line in text) == len(SCHEDULES)
    bad = {**document, "findings": [{**document["findings"][0], "verdict": "fail"}]}
    assert any(line.startswith("failed: the bubble of torch's order") for line in pipeline_lines(bad))


def test_a_long_step_is_drawn_in_pieces_of_equal_length():
    ranks = [[(0, "F", m, m, m + 1) for m in range(40)], [(1, "B", 11, 2, 4), (3, "W", 0, 4, 5)]]
    text = drawing(ranks)
    assert max(map(len, text)) <= 80
    assert [line for line in text if line.startswith(" units")] == [" units 0-19", " units 20-39"]
    assert text[2] == " rank 1  ......B11---w0-" + "..." * 15


def test_it_never_asks_for_what_a_schedule_refuses(tmp_path, monkeypatch):
    def no_ranks(seen, *_):
        assert [one.schedule.name for one in seen if one.drawn is None] == ["1f1b", "dualpipe-v"]

    monkeypatch.setattr("fourfold.lab.pipeline._run", no_ranks)
    monkeypatch.setattr("fourfold.lab.pipeline._sharded", lambda _: [])
    found = lab_pipeline(nproc=3, microbatches=2, out=tmp_path)
    assert found["verdict"] == "fail"  # nothing ran: that proves nothing
    text = pipeline_lines(found)
    assert " not drawn: it demands at least as many microbatches as stages (3)" in text
    assert max(map(len, text[:-1])) <= 80


@pytest.mark.parametrize(
    ("fault", "fails"),
    [
        ("another_schedule", {"real ranks do what is drawn, in that order"}),
        ("rank_1_is_slow", {"a step takes as long on real ranks as the clock says, and at most 50% longer"}),
        ("gradients_are_scaled", {"gradients are those of one device, under every schedule"}),
    ],
)
def test_ranks_that_do_otherwise_fail_the_exercise(tmp_path, monkeypatch, fault, fails):
    monkeypatch.setattr("fourfold.lab.pipeline._sharded", lambda _: [])
    monkeypatch.setattr(
        "fourfold.lab.pipeline.SCHEDULES", {name: SCHEDULES[name] for name in ("gpipe", "zbv")}
    )
    found = lab_pipeline(nproc=2, out=tmp_path, setup=f"tests.lab.pipeline_faults:{fault}")
    assert found["verdict"] == "fail"
    failed = {one["claim"] for one in found["findings"][:4] if one["verdict"] == "fail"}
    assert fails <= failed, failed


def test_a_torch_that_is_right_again_would_be_told(document):
    mended = [{**one, "gap": 0.0} if one["name"] == "zbv" else one for one in document["sharded"]]
    verdicts = [finding.verdict for finding in _sharded_findings(mended, "")]
    assert verdicts == ["fail", "pass"]
    broken = [{**one, "gap": 0.5} if one["name"] == "gpipe" else one for one in document["sharded"]]
    assert [finding.verdict for finding in _sharded_findings(broken, "")] == ["pass", "fail"]


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ({"nproc": 5}, "--nproc 4"),
        ({"nproc": 1}, "--nproc 2"),
        ({"microbatches": 0}, "--microbatches 1"),
        ({"microbatches": 33}, "--microbatches 32"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_any_rank_starts(asked, instead, monkeypatch):
    monkeypatch.setattr("fourfold.lab.pipeline.RankPool", None)
    with pytest.raises(SpecError) as error:
        lab_pipeline(**asked)
    assert error.value.problems[0].instead == instead


def test_the_command(document, monkeypatch, capsys):
    calls = []

    def answer(**more):
        calls.append(more)
        return document if more["nproc"] == 4 else {**document, "verdict": "fail"}

    monkeypatch.setattr("fourfold.lab.pipeline.lab_pipeline", answer)
    assert main(["lab", "pipeline"]) == 0
    printed = capsys.readouterr()
    assert "interleaved-zero-bubble, 2 stages a rank" in printed.out and "next: fourfold" in printed.err
    assert main(["lab", "pipeline", "--nproc", "2", "--microbatches", "8", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["schema"] == "fourfold.lab.pipeline/1"
    assert calls[1]["command"] == "fourfold lab pipeline --nproc 2 --microbatches 8"
    assert main(["lab", "pipeline", "--help"]) == 0
    assert capsys.readouterr().out.count("fourfold lab pipeline") == 4
