from __future__ import annotations

import json

import pytest

from fourfold.cli.lab_memory import memory_lines
from fourfold.cli.main import main
from fourfold.lab import memory
from fourfold.lab.memory import INSTANTS, is_even, lab_memory, layouts, ratio
from fourfold.spec.errors import DataError, SpecError


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    return lab_memory(out=tmp_path_factory.mktemp("lab"))


def test_every_rank_holds_what_was_predicted(document):
    assert (document["schema"], document["verdict"]) == ("fourfold.lab.memory/1", "pass")
    assert [entry["name"] for entry in document["layouts"]] == ["ddp", "zero-1", "zero-2", "zero-3"]
    for entry in document["layouts"]:
        assert [at["instant"] for at in entry["instants"]] == list(INSTANTS)
        assert all(at["measured"] == at["predicted"] for at in entry["instants"])
    facts = [f for f in document["findings"] if f["kind"] == "fact"]
    assert len(facts) == 7 and all(f["verdict"] == "pass" for f in facts)
    (untested,) = [f for f in document["findings"] if f["kind"] == "open"]
    assert untested["would_test"] == "fourfold lab memory --nproc 4"


def test_what_the_formula_leaves_out_has_a_size(document):
    count = document["parameters"]
    for entry in document["layouts"]:
        sizes = {part["what"]: part["bytes"] for part in entry["omitted"]}
        assert sizes["activations"] > count  # more than a byte a parameter
        more = sizes["gathered"]
        assert (more > 0) == (entry["name"] == "zero-3")
        assert more < 2 * count  # a unit or two of six, not the whole model


def test_the_table_fits_and_says_it_all(document):
    lines = memory_lines(document)
    assert max(map(len, lines[:-1])) <= 80
    text = "\n".join(lines)
    assert text.count(" -> as predicted") == 4 and "not tested: HSDP" in text
    assert text.count("between microbatches ") >= 4
    told = " ".join(text.split())
    assert "textbook: 12.00 at most, in the precision of this run (10.00 with 2-byte parameters" in told
    sizes = [f"{part['bytes'] / 2**20:.2f}" for part in document["layouts"][0]["omitted"] if part["bytes"]]
    assert all(f" {size} " in told for size in sizes) and len(sizes) == 3
    assert told.count("these processes are new") == 2  # for two shapes of the mesh: DDP's, and that of shards
    bad = {**document, "verdict": "fail", "layouts": [{**e, "verdict": "fail"} for e in document["layouts"]]}
    bad["findings"] = [{**document["findings"][0], "verdict": "fail"}]
    text = "\n".join(memory_lines(bad))
    assert text.count("NOT as predicted") == 4 and "failed: ddp: every rank holds" in text


@pytest.fixture
def asked(monkeypatch, document):
    calls = []

    def answer(**more):
        calls.append(more)
        return document if more["nproc"] == 2 else {**document, "verdict": "fail"}

    monkeypatch.setattr(memory, "lab_memory", answer)
    return calls


def test_the_command(asked, tmp_path, capsys):
    assert main(["lab", "memory", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "ZeRO-2: moments and gradients sharded" in printed.out and "next: fourfold train" in printed.err
    assert main(["lab", "memory", "--nproc", "4", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "fail"
    assert asked[1]["command"] == "fourfold lab memory --nproc 4"
    assert main(["lab", "memory", "--ranks", "4"]) == 2


def test_one_rank_has_nothing_to_shard():
    with pytest.raises(SpecError, match="--nproc 2"):
        lab_memory(nproc=1)


@pytest.mark.parametrize(
    ("asked", "instead"), [(99, "--nproc 32"), (5, "--nproc 4 or --nproc 8"), (10**5, "--nproc 32")]
)
def test_more_ranks_than_the_model_is_cut_into_evenly_are_refused_before_any_starts(asked, instead):
    with pytest.raises(SpecError) as error:
        lab_memory(nproc=asked)
    assert error.value.problems[0].instead == instead
    assert [number for number in range(2, 10) if is_even(number)] == [2, 3, 4, 8]


def test_a_place_for_the_findings_that_cannot_be_made_is_refused_before_any_rank_starts(
    tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setattr("fourfold.lab.memory.RankPool", None)
    with pytest.raises(DataError) as error:
        lab_memory(out=tmp_path / "file")
    assert error.value.problems[0].instead == "--out ANOTHER/PLACE"


def test_hsdp_takes_two_replicas_of_two_shards():
    assert [one.name for one in layouts(3)][-1] == "zero-3"
    assert layouts(6)[-1].sets == ("layout.zero=3", "layout.dp_replicate=2", "layout.dp_shard=3")


def test_ratios_of_nothing():
    assert [ratio(3, 2), ratio(0, 0), ratio(1, 0)] == [1.5, 1.0, float("inf")]


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ("stage_2_is_stage_1", {"zero-2"}),
        ("rank_1_keeps_a_copy", {"ddp", "zero-1", "zero-2", "zero-3"}),
    ],
)
def test_state_that_was_not_predicted_fails_the_exercise(tmp_path, fault, caught):
    found = lab_memory(out=tmp_path, setup=f"tests.lab.memory_faults:{fault}")
    assert found["verdict"] == "fail"
    assert {e["name"] for e in found["layouts"] if e["verdict"] == "fail"} == caught
    failed = next(f for f in found["findings"] if f["verdict"] == "fail")
    assert "worst: " in failed["measured"]


@pytest.mark.long
def test_hsdp_holds_what_was_predicted(tmp_path):
    found = lab_memory(nproc=4, out=tmp_path)
    assert found["verdict"] == "pass"
    hsdp = found["layouts"][-1]
    assert (hsdp["name"], hsdp["ranks"]) == ("hsdp", 2)
    assert not any(f["kind"] == "open" for f in found["findings"])
