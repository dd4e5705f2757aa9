"""What ranks report, judged without any ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.spec.boxes import Box
from fourfold.verify.judge import Judge
from fourfold.verify.on_rank import RankGaps, StepGaps
from fourfold.verify.reference import Reference, StepReference

STEP = StepReference(2.0, 4, 1.0, 1.0, frozenset(), 0.1, {"w": 1.0})
REFERENCE = Reference(Path(), ("w",), ((4, 2),), (STEP,), 1.0, {0: {"w": 1.0}})
HALVES = (Box((0, 0), (2, 2)), Box((2, 0), (2, 2)))


def rank(dp_rank, box, counts=True, loss=4.0, valid=2):
    step = StepGaps(loss, valid, 4, 1.0, {"w": 0.0})
    return RankGaps((step,), {"w": 0.0}, {"w": box}, dp_rank, counts, {})


def judged(ranks):
    judge = Judge("again", [])
    judge.gate(ranks, REFERENCE)
    return judge, [f.claim for f in judge.findings if f.verdict == "fail"]


def finding(judge, text):
    return next(f for f in judge.findings if text in f.claim)


def test_two_halves_of_the_samples_and_of_the_tensor():
    judge, failed = judged([rank(0, HALVES[0]), rank(1, HALVES[1])])
    assert failed == [] and judge.worst_gate == 0.0
    assert "cut between the ranks" in finding(judge, "cover every tensor").measured
    assert judge.valid == [[2, 2]]


def test_a_box_that_no_rank_holds_fails_though_every_value_agrees():
    judge, failed = judged([rank(0, HALVES[0]), rank(1, HALVES[0])])
    assert failed == ["the boxes of all ranks cover every tensor"]
    assert finding(judge, "cover every tensor").measured == "on none: w: 4 elements"


def test_peers_count_once_and_must_agree():
    pair = [rank(0, HALVES[0], loss=8.0, valid=4), rank(0, HALVES[1], counts=False, loss=8.0, valid=4)]
    judge, failed = judged(pair)
    assert failed == [] and judge.valid == [[4]]
    for other in ({"loss": 8.1, "valid": 4}, {"loss": 8.0, "valid": 3}, {"loss": float("nan"), "valid": 4}):
        judge, failed = judged([pair[0], rank(0, HALVES[1], counts=False, **other)])
        assert failed == ["ranks that work on the same samples report the same loss and targets"], other
        assert "rank 1" in finding(judge, "the same loss").measured
    nobody = [replace(one, counts=False) for one in pair]
    assert "the same loss and targets" in " ".join(judged(nobody)[1])


@pytest.mark.parametrize("gap", [float("nan"), float("inf"), 1e-9])
def test_no_value_beyond_the_bound_passes(gap):
    wrong = replace(rank(1, HALVES[1]), parameters={"w": gap})
    judge, failed = judged([rank(0, HALVES[0]), wrong])
    assert len(failed) == 1 and "every parameter" in failed[0]
    assert judge.worst_gate == (gap if gap == 1e-9 else float("inf"))
