from __future__ import annotations

import json

import numpy as np
import pytest

from fourfold.cli.lab_coverage import coverage_lines
from fourfold.cli.main import main
from fourfold.lab import coverage
from fourfold.lab.coverage import EXERCISES, SAMPLES, WORLD, lab_coverage


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    return lab_coverage(out=tmp_path_factory.mktemp("lab"))


def test_the_right_way_is_clean_and_every_mistake_is_caught(document):
    assert (document["schema"], document["verdict"]) == ("fourfold.lab.coverage/1", "pass")
    assert (document["duplicates"], document["missing"]) == (0, 0)
    assert len(document["exercises"]) == len(document["findings"]) == 6
    right, *mistakes = document["exercises"]
    read = [i for rank in right["ids"] for i in rank[0] if i >= 0]
    assert sorted(read) == list(range(SAMPLES)) and len(right["ids"]) == WORLD
    for entry in mistakes:
        assert entry["duplicates"] or entry["missing"] or entry["same_order"], entry["title"]


def test_each_mistake_shows_in_its_own_way(document):
    numbers = {e["name"]: (e["duplicates"], e["missing"], e["same_order"]) for e in document["exercises"]}
    assert numbers["same-samples"] == (2 * SAMPLES, 0, False)
    assert numbers["wrap-around"] == (6, 0, False)
    assert numbers["own-tail"] == (0, 2, False)
    assert numbers["epoch-forgotten"] == (0, 0, True)
    assert numbers["unequal-seeds"][0] == numbers["unequal-seeds"][1] > 0


def test_a_mistake_that_is_not_caught_fails_the_exercise(monkeypatch, tmp_path):
    blind = coverage.audit
    monkeypatch.setattr(
        coverage, "audit", lambda _ids, samples, due: blind([np.arange(samples)], samples, due)
    )
    document = lab_coverage(out=tmp_path)
    assert document["verdict"] == "fail"
    caught = {
        e["name"]
        for e, f in zip(document["exercises"], document["findings"], strict=True)
        if f["verdict"] == "pass"
    }
    assert caught == {"right", "epoch-forgotten"}


def test_a_right_way_that_is_not_clean_fails_the_exercise(document):
    entry = {**document["exercises"][0], "missing": 1}
    assert coverage._finding(EXERCISES["right"], entry, "").verdict == "fail"


def test_the_command_prints_every_rank_within_80_columns(document, tmp_path, capsys):
    assert max(map(len, coverage_lines(document)[:-1])) <= 80
    assert main(["lab", "coverage", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("rank 1 epoch 2:") == 6
    assert printed.out.count("-> caught") == 5 and "-> clean" in printed.out
    assert "next: fourfold verify coverage" in printed.err
    assert main(["lab", "coverage", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "pass"
