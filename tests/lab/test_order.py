from __future__ import annotations

import json

import pytest

from fourfold.cli.lab_order import order_lines
from fourfold.cli.main import main
from fourfold.lab.order import MISTAKES, lab_order
from fourfold.spec.errors import SpecError

pytestmark = pytest.mark.timeout(300)
BY_NAME = {mistake.function: mistake for mistake in MISTAKES}


def test_a_swap_is_silent_in_torch_and_named_here(tmp_path):
    story = []
    document = lab_order(mistakes=[BY_NAME["another_order"]], out=tmp_path, say=story.append)
    assert (document["schema"], document["verdict"]) == ("fourfold.lab.order/1", "pass")
    (entry,) = document["mistakes"]
    assert entry["torch_alone"] == "no error; sums (11.0, 11.0) in place of (2.0, 20.0)"
    assert "rank 1 called all_reduce of [3] float32 at fourfold.lab.order_ranks" in entry["fourfold"]
    with open(document["findings_file"]) as file:
        assert json.load(file)["findings"] == document["findings"]
    assert len(story) == 1
    text = order_lines(document)
    assert max(map(len, text[:-1])) <= 80
    assert not any(line.lstrip().startswith("why:") for line in text)


def test_an_abort_is_explained_by_what_the_ranks_left(tmp_path):
    document = lab_order(mistakes=[BY_NAME["another_shape"]], out=tmp_path)
    assert document["verdict"] == "pass"
    (entry,) = document["mistakes"]
    assert "SIGABRT" in entry["torch_alone"] and "[1003]" not in entry["torch_alone"]
    assert "rank 1 called all_reduce of [1003] float32" in entry["fourfold"]


@pytest.mark.long
@pytest.mark.parametrize("nproc", [2, 4])
def test_every_mistake_is_named_in_time_and_patience_is_no_mistake(tmp_path, nproc):
    document = lab_order(nproc=nproc, out=tmp_path)
    assert document["verdict"] == "pass", [one for one in document["findings"] if one["verdict"] != "pass"]
    assert [entry["name"] for entry in document["mistakes"]] == [mistake.function for mistake in MISTAKES]
    alone = {entry["name"]: entry["torch_alone"] for entry in document["mistakes"]}
    assert alone["nothing"] == "" and all(told for name, told in alone.items() if name != "nothing")


def test_what_does_not_name_the_line_fails(tmp_path):
    wrong = BY_NAME["another_order"].__class__("another_order", "a title", lines=("nowhere",))
    document = lab_order(mistakes=[wrong], out=tmp_path)
    assert document["verdict"] == "fail"
    assert "no line of nowhere" in document["findings"][0]["measured"]


@pytest.mark.parametrize("nproc", [0, 1, 9])
def test_another_number_of_ranks_is_refused(nproc, capsys):
    with pytest.raises(SpecError, match="2 to 8"):
        lab_order(nproc=nproc)
    assert main(["lab", "order", "--nproc", str(nproc)]) == 2
    assert f"--nproc {2 if nproc < 2 else 8}" in capsys.readouterr().err
