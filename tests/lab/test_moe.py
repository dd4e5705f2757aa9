from __future__ import annotations

import json
from unittest.mock import patch

import numpy as np
import pytest

from fourfold.cli.lab_moe import moe_lines
from fourfold.cli.main import main
from fourfold.lab import moe
from fourfold.lab.moe import lab_moe
from fourfold.lab.moe_product import at_the_gate
from fourfold.lab.moe_steps import MISTAKES, PARTS, STEPS, travellers
from fourfold.spec.errors import SpecError

pytestmark = pytest.mark.timeout(300)
LONG = pytest.mark.long


def gate(caught=True):
    """What `verify equal` would say."""
    where = {
        "step": 1, "microbatch": 0, "rank": 0, "phase": "forward", "place": "ffn", "axis": "ep", "gap": 0.5, "after": ""
    }  # fmt: skip
    return lambda *_: {
        "verdict": "fail" if caught else "pass",
        "first_deviation": where if caught else None,
    }


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=LONG)])
def document(request, tmp_path_factory):
    with patch.object(moe, "at_the_gate", gate()):  # it has tests of its own below
        return lab_moe(nproc=request.param, out=tmp_path_factory.mktemp("lab"))


@pytest.fixture
def layer_alone(monkeypatch):
    """Without what takes longest."""
    monkeypatch.setattr(moe, "at_the_gate", gate())
    monkeypatch.setattr(moe, "_larger", lambda *_: [])
    monkeypatch.setattr(moe, "_balance", lambda *_: ([], []))


def steps(document):
    return {step["name"]: step for part in document["parts"] for step in part["steps"]}


def failed(document):
    return [one["claim"].partition(":")[0] for one in document["findings"] if one["verdict"] == "fail"]


def test_every_value_is_one_devices_and_every_mistake_shows(document):
    assert (document["schema"], document["verdict"]) == ("fourfold.lab.moe/1", "pass")
    assert len(document["findings"]) == len(PARTS) + 5 + 2 * len(MISTAKES)
    found = steps(document)
    assert list(found) == [step.name for step in STEPS]
    whole_numbers = {
        "x",
        "chosen",
        "counts",
        "counts that came",
        "sent",
        "came",
        "sorted",
        "m",
        "returned",
        "y",
        "∂A",
    }
    assert {name for name in whole_numbers if found[name]["gap"]} == set()
    assert max(step["gap"] for step in found.values()) <= 1e-15
    with open(document["findings_file"]) as file:
        assert json.load(file)["findings"] == document["findings"]


def test_the_layer_is_what_numpy_says_it_is(document):
    have = {name: np.array(step["one_device"]) for name, step in steps(document).items()}
    tokens, experts = np.arange(8)[:, None], have["chosen"]
    assert np.allclose(
        have["scores"], 2 ** (have["z"] / np.log(2)) / (2 ** (have["z"] / np.log(2))).sum(1)[:, None]
    )
    assert (experts == np.argsort(-have["scores"], 1)[:, :2]).all()
    assert np.allclose(have["w"], [[2 / 3, 1 / 3]] * 8)
    made = np.einsum("tkoh,th->tko", have["A"][experts], have["x"])
    assert np.allclose(have["y"], (made * have["w"][..., None]).sum(1))
    assert (np.round(have["y"]) == np.round(have["y"], 9)).all()  # whole numbers
    back = have["w"][..., None] * have["∂y"][:, None]
    for expert in range(4):
        mine = experts == expert
        of_expert = back[mine].T @ have["x"][np.broadcast_to(tokens, mine.shape)[mine]]
        assert np.allclose(have["∂A"][expert], of_expert)
    by_weight = (made * have["∂y"][:, None]).sum(-1)
    by_logit = have["w"] * (by_weight - (have["w"] * by_weight).sum(1)[:, None])
    router = np.zeros((4, 2))
    np.add.at(router, experts, by_logit[..., None] * have["x"][:, None])
    assert np.allclose(have["∂R"], router)


def test_tokens_go_to_their_experts_and_come_back(document):
    found, ranks = steps(document), document["ranks"]
    assert [step["name"] for step in found.values() if step["collective"] == "all-to-all"] == [
        "counts that came", "came", "returned", "∂m by rank", "∂sent"
    ]  # fmt: skip
    sent = {f"{label} r{rank}" for rank in range(ranks) for label in found["sent"]["labels"][rank]}
    assert sent == {label for rank in found["came"]["labels"] for label in rank} and len(sent) == 16
    for rank in range(ranks):
        assert {int(label.split()[1][1]) // 2 for label in found["came"]["labels"][rank]} <= {rank % 2}
        counts = np.array(found["counts that came"]["ranks"][rank])
        assert counts.sum() == len(found["came"]["ranks"][rank])
    for name in ("sent", "came", "sorted"):
        for values, labels in zip(found[name]["ranks"], found[name]["labels"], strict=True):
            assert [found["x"]["one_device"][int(label[1])] for label in labels] == values


def test_who_travels_by_hand():
    expert_of = [1, 0, 2, 3, 0, 4, 3, 1]  # 4 tokens, 4: dropped
    assert travellers("sent", 0, 2, expert_of, 4) == [1, 0, 2, 3]
    assert travellers("came", 0, 2, expert_of, 4) == [1, 0, 4, 7]
    assert travellers("sorted", 0, 2, expert_of, 4) == [1, 4, 0, 7]
    assert travellers("came", 3, 4, expert_of, 4) == [6]


def test_what_a_capacity_drops_is_told_by_the_row(document):
    by_row, together, halves = document["capacity"]["dropped"]
    assert (by_row["limit"], by_row["dropped"]) == (2, ["t1 e0", "t2 e1", "t3 e0"])
    assert (together["limit"], halves["limit"]) == (4, 1) and together["dropped"] != by_row["dropped"]
    free, limited = document["capacity"]["load"]["free"], document["capacity"]["load"]["limited"]
    assert sum(one["choices"] for one in free) == 16 and sum(one["choices"] for one in limited) == 13
    if document["ranks"] == 2:
        assert free == [
            {"choices": 11, "from_others": 4, "bytes": 64}, {"choices": 5, "from_others": 1, "bytes": 16}
        ]  # fmt: skip


def test_balance_evens_the_load(document):
    ends = {way["name"]: way["at_the_end"] for way in document["balance"]}
    assert ends["none"] > 1.8 and ends["loss"] < 1.3 and ends["bias"] < 1.3
    for way in document["balance"]:
        assert {sum(load) for load in way["loads"]} == {256} and way["losses"][-1] < way["losses"][0] / 2
    assert len({tuple(way["loads"][0]) for way in document["balance"]}) == 1  # all begin alike


def test_each_mistake_spoils_what_it_says_and_nothing_before(document):
    by_name = {one["name"]: one for one in document["mistakes"]}
    assert [one.name for one in MISTAKES] == list(by_name)
    assert {one["verdict"] for one in by_name.values()} == {"pass"}
    assert list(by_name["router-cut"]["gaps"]) == ["∂z", "∂R part", "∂R", "∂x"]
    assert by_name["experts-counted-again"]["gaps"] == {"∂A": pytest.approx(1.0)}
    example = by_name["experts-counted-again"]["example"]
    assert example["found"] == 2 * example["right"]
    assert {"y", "∂R"} <= set(by_name["order-lost"]["gaps"])
    for name in ("auxiliary-of-the-batch", "auxiliary-by-ranks"):
        assert {"y", "∂R", "∂A", "P part"} <= set(by_name[name]["still_right"])
        assert by_name[name]["gaps"].keys() >= {"aux", "∂R of aux"}


def test_it_prints_every_value_within_80_columns(document):
    text = moe_lines(document)
    assert max(map(len, text[:-1])) <= 80
    for step in STEPS:
        assert sum(line.startswith(f" {step.name} = ") for line in text) == 1, step.name
    assert sum(line == " -> caught" for line in text) == len(MISTAKES)
    told = " ".join(" ".join(text).split())
    assert "-0" not in told.split()
    assert told.count("sum: one device") == 4
    assert (
        "with this mistake in its ranks: verdict fail; step 1, microbatch 0, rank 0: forward of ffn" in told
    )
    if document["ranks"] == 2:
        assert " rank 0 rank 1 t0 e0 r0 6 3 t4 e2 r1 3 6 " in told
        assert "dropless 0 11 64 the others wait for it 1 5 16 waits 55%" in told
    bad = {**document, "findings": [{**document["findings"][-2], "verdict": "fail"}]}
    assert any(line.startswith(" failed: auxiliary-by-ranks") for line in moe_lines(bad))


@pytest.mark.parametrize(
    ("fault", "nproc", "fails"),
    [
        ("sums_are_means", 2, {"backward", "balance", "capacity"}),
        ("tokens_in_another_order", 2, {"forward", "backward", "capacity"}),
        ("mistakes_do_nothing", 2, {mistake.name for mistake in MISTAKES}),
        pytest.param("copies_go_their_own_ways", 4, {"backward", "capacity"}, marks=LONG),
    ],
)
@pytest.mark.usefixtures("layer_alone")
def test_ranks_that_compute_something_else_fail_the_exercise(tmp_path, fault, nproc, fails):
    found = lab_moe(nproc=nproc, out=tmp_path, setup=f"tests.lab.moe_faults:{fault}")
    assert found["verdict"] == "fail" and fails <= set(failed(found))


@LONG
def test_ranks_that_drop_or_balance_otherwise_fail_the_exercise(tmp_path, monkeypatch):
    monkeypatch.setattr(moe, "at_the_gate", gate(caught=False))
    found = lab_moe(out=tmp_path, setup="tests.lab.moe_faults:rows_and_balance")
    assert failed(found)[:5] == ["capacity", "larger", "product", "training", "training"]
    assert {one["verdict"] for one in found["mistakes"]} == {"fail"}  # the gate lets them pass
    assert " -> NOT caught" in moe_lines(found)


@pytest.mark.parametrize(
    ("mistake", "phase", "place"),
    [
        ("router-cut", "backward", "blocks.0.ffn_norm"),
        pytest.param("order-lost", "forward", "blocks.0.ffn.routed", marks=LONG),
        pytest.param("experts-counted-again", "gradient before clipping", ".experts.", marks=LONG),
        pytest.param("auxiliary-of-the-batch", "backward", "blocks.0.ffn_norm", marks=LONG),
        pytest.param("auxiliary-by-ranks", "backward", "blocks.0.ffn_norm", marks=LONG),
    ],
)
def test_verify_equal_catches_each_in_the_products_own_ranks(mistake, phase, place, tmp_path):
    told = at_the_gate(mistake, tmp_path)
    assert told["verdict"] == "fail"
    assert told["first_deviation"]["phase"] == phase and place in told["first_deviation"]["place"]


@LONG
def test_without_a_mistake_the_gate_holds(tmp_path):
    assert at_the_gate("", tmp_path)["verdict"] == "pass"


@pytest.mark.parametrize(("asked", "instead"), [(1, "--nproc 2"), (3, "--nproc 4"), (8, "--nproc 4")])
def test_other_numbers_of_ranks_are_refused(asked, instead, monkeypatch):
    monkeypatch.setattr("fourfold.lab.moe.RankPool", None)
    with pytest.raises(SpecError) as error:
        lab_moe(nproc=asked)
    (problem,) = error.value.problems
    assert problem.instead == instead and problem.asked == f"fourfold lab moe --nproc {asked}"


def test_the_command(document, monkeypatch, capsys):
    calls = []

    def answer(**more):
        calls.append(more)
        return document if more["nproc"] == 2 else {**document, "verdict": "fail"}

    monkeypatch.setattr("fourfold.lab.moe.lab_moe", answer)
    assert main(["lab", "moe"]) == 0
    printed = capsys.readouterr()
    assert (
        "tokens go to their experts" in printed.out and "next: fourfold verify equal moe-tiny" in printed.err
    )
    assert main(["lab", "moe", "--nproc", "4", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["schema"] == "fourfold.lab.moe/1"
    assert calls[1]["command"] == "fourfold lab moe --nproc 4"
    assert main(["lab", "moe", "--help"]) == 0
    assert capsys.readouterr().out.count("fourfold lab moe") == 4
