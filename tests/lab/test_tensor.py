from __future__ import annotations

import json
from unittest.mock import patch

import numpy as np
import pytest

from fourfold.cli.lab_tensor import side_by_side, tensor_lines
from fourfold.cli.main import main
from fourfold.lab import tensor
from fourfold.lab.tensor import lab_tensor
from fourfold.lab.tensor_product import at_the_gate
from fourfold.lab.tensor_steps import MISTAKES, PARTS
from fourfold.spec.errors import SpecError

pytestmark = pytest.mark.timeout(300)


def gate(caught=True):
    """What `verify equal` would say."""
    where = {
        "step": 1, "microbatch": 0, "rank": 0, "phase": "forward", "place": "up", "axis": "tp", "gap": 0.5, "after": ""
    }  # fmt: skip
    return lambda *_: {
        "verdict": "fail" if caught else "pass",
        "first_deviation": where if caught else None,
    }


@pytest.fixture(scope="module", params=[2, 4])
def document(request, tmp_path_factory):
    with patch.object(tensor, "at_the_gate", gate()):  # it has tests of its own below
        return lab_tensor(nproc=request.param, out=tmp_path_factory.mktemp("lab"))


def steps(document, part):
    entry = next(one for one in document["parts"] if one["name"] == part)
    return {step["name"]: step for step in [*entry["forward"], *entry["backward"]]}


def test_every_value_is_one_devices_and_every_mistake_shows(document):
    assert (document["schema"], document["verdict"]) == ("fourfold.lab.tensor/1", "pass")
    assert len(document["findings"]) == 3 * len(PARTS) + 2 * len(MISTAKES)
    for part in PARTS:
        found = steps(document, part.name)
        assert list(found) == [step.name for step in part.steps]
        assert all(step["gap"] == 0.0 for step in found.values())  # whole numbers: exact
    with open(document["findings_file"]) as file:
        assert json.load(file)["findings"] == document["findings"]


@pytest.mark.parametrize("part", ["tensor", "sequence"])
def test_what_ranks_have_makes_the_whole(document, part):
    for step in steps(document, part).values():
        parts, whole = np.array(step["ranks"]), np.array(step["one_device"])
        assert list(parts[0].shape) == step["shape"] and list(whole.shape) == step["whole_shape"]
        if step["place"] == "partial":
            assert (parts.sum(0) == whole).all() and not (parts[0] == whole).all()
        elif step["place"] == "whole":
            assert all((one == whole).all() for one in parts)
        else:
            cut = np.concatenate(list(parts), 0 if step["place"] == "rows" else 1)
            assert (cut == whole).all()


def test_the_layer_is_what_numpy_says_it_is(document):
    found = {name: np.array(step["one_device"]) for name, step in steps(document, "tensor").items()}
    z = (found["x0"] * found["s"]) @ found["U"].T + found["u"]
    assert (found["y"] == np.maximum(z, 0) @ found["D"].T + found["d"]).all()
    back = (found["∂y"] @ found["D"]) * (z > 0)
    assert (found["∂U"] == back.T @ found["x"]).all()
    assert (found["∂s"] == ((back @ found["U"]) * found["x0"]).sum(0)).all()


def test_the_collectives_are_those_of_the_papers(document):
    asked = {
        part.name: [step["collective"] for step in steps(document, part.name).values() if step["collective"]]
        for part in PARTS
    }
    assert asked["tensor"] == ["all-reduce", "all-reduce"]
    assert asked["sequence"] == [
        "all-gather", "reduce-scatter", "all-reduce", "all-gather", "reduce-scatter", "all-reduce"
    ]  # fmt: skip


def test_each_mistake_spoils_what_it_says_and_nothing_before(document):
    by_name = {one["name"]: one for one in document["mistakes"]}
    assert [one.name for one in MISTAKES] == list(by_name)
    assert {one["verdict"] for one in by_name.values()} == {"pass"}
    assert list(by_name["no-sum-forward"]["gaps"]) == ["sum", "y"]
    backward = by_name["no-sum-backward"]
    assert list(backward["gaps"]) == ["∂x", "∂s", "∂x0"] and {"y", "∂U", "∂D"} <= set(backward["still_right"])
    assert backward["ranks_differ"] and not by_name["bias-on-every-rank"]["ranks_differ"]
    sums = steps(document, "tensor")["sum"]["one_device"]
    example = by_name["bias-on-every-rank"]["example"]
    assert example["right"] == sums[example["index"][0]][example["index"][1]]
    d = steps(document, "tensor")["d"]["one_device"][example["index"][1]]
    assert example["found"] - example["right"] == document["ranks"] * d
    assert list(by_name["no-sum-of-slices"]["gaps"]) == ["∂s"]


def test_it_prints_every_value_within_80_columns(document):
    text = tensor_lines(document)
    assert max(map(len, text[:-1])) <= 80
    for part in PARTS:
        for step in part.steps:
            assert sum(line.startswith(f" {step.name} = ") for line in text) >= 1, step.name
    assert sum(line == " -> caught" for line in text) == len(MISTAKES)
    assert "-0" not in " ".join(text).split()
    told = " ".join(" ".join(text).split())
    ranks = document["ranks"]
    assert f"z = x Uᵀ + u 4×{8 // ranks} of 4×8, cut by columns" in told
    assert "part = h Dᵀ 4×4, a partial sum on every rank" in told
    assert told.count("sum: one device") == 6
    assert "with this mistake in its ranks: verdict fail; step 1, microbatch 0, rank 0: forward of up" in told
    bad = {**document, "findings": [{**document["findings"][-2], "verdict": "fail"}]}
    assert any(line.startswith(" failed: no-sum-of-slices") for line in tensor_lines(bad))


def test_blocks_that_do_not_fit_stand_below():
    blocks = [(f"rank {rank}", [[100.0, -20.0], [3.0, 4.0]]) for rank in range(4)]
    assert side_by_side(blocks, 40) == [
        "    rank 0     rank 1     rank 2",
        "    100 -20    100 -20    100 -20",
        "      3   4      3   4      3   4",
        "    rank 3",
        "    100 -20",
        "      3   4",
    ]


@pytest.mark.parametrize(
    ("fault", "fails"),
    [
        ("sums_are_means", "tensor: every value of every rank"),
        ("slices_in_another_order", "sequence: every value of every rank"),
        ("mistakes_do_nothing", "no-sum-forward: it raises no error"),
    ],
)
def test_ranks_that_compute_something_else_fail_the_exercise(tmp_path, monkeypatch, fault, fails):
    monkeypatch.setattr(tensor, "at_the_gate", gate())
    found = lab_tensor(out=tmp_path, setup=f"tests.lab.tensor_faults:{fault}")
    assert found["verdict"] == "fail"
    assert any(f["claim"].startswith(fails) for f in found["findings"] if f["verdict"] == "fail")
    assert any(line.startswith(" failed: ") for line in tensor_lines(found))


def test_a_gate_that_lets_a_mistake_pass_fails_the_exercise(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor, "at_the_gate", gate(caught=False))
    found = lab_tensor(out=tmp_path)
    assert found["verdict"] == "fail"
    assert {one["verdict"] for one in found["mistakes"]} == {"fail"}
    assert " -> NOT caught" in tensor_lines(found)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("mistake", "phase", "place"),
    [
        ("no-sum-forward", "forward", "blocks.0.attention.output"),
        ("no-sum-backward", "backward", "norm"),
        pytest.param("bias-on-every-rank", "gradient before the reduction", "down.bias", marks=LONG),
        pytest.param("no-sum-of-slices", "gradient before clipping", "norm.weight", marks=LONG),
    ],
)
def test_verify_equal_catches_each_in_the_products_own_ranks(mistake, phase, place, tmp_path):
    told = at_the_gate(mistake, 2, tmp_path)
    assert told["verdict"] == "fail"
    assert told["first_deviation"]["phase"] == phase and place in told["first_deviation"]["place"]


@pytest.mark.long
def test_without_a_mistake_the_gate_holds(tmp_path):
    assert at_the_gate("", 2, tmp_path)["verdict"] == "pass"


@pytest.mark.parametrize(("asked", "instead"), [(1, "--nproc 2"), (3, "--nproc 4"), (8, "--nproc 4")])
def test_other_numbers_of_ranks_are_refused(asked, instead, monkeypatch):
    monkeypatch.setattr("fourfold.lab.tensor.RankPool", None)
    with pytest.raises(SpecError) as error:
        lab_tensor(nproc=asked)
    assert error.value.problems[0].instead == instead


def test_the_command(document, monkeypatch, capsys):
    calls = []

    def answer(**more):
        calls.append(more)
        return document if more["nproc"] == 2 else {**document, "verdict": "fail"}

    monkeypatch.setattr("fourfold.lab.tensor.lab_tensor", answer)
    assert main(["lab", "tensor"]) == 0
    printed = capsys.readouterr()
    assert "column parallel, then row parallel" in printed.out and "next: fourfold verify" in printed.err
    assert main(["lab", "tensor", "--nproc", "4", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["schema"] == "fourfold.lab.tensor/1"
    assert calls[1]["command"] == "fourfold lab tensor --nproc 4"
    assert main(["lab", "tensor", "--help"]) == 0
    assert capsys.readouterr().out.count("fourfold lab tensor") == 4
