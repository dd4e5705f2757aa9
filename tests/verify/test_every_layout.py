from __future__ import annotations

import json
import os
import re
import shlex
import signal
from itertools import product

import pytest

from fourfold.cli.main import main
from fourfold.cli.verify import layouts_table
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.layouts import layouts
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.verify.case import Ranks, search
from fourfold.verify.equal import prepared
from fourfold.verify.every_layout import verify_every_layout
from fourfold.verify.layout_words import settings, words
from fourfold.verify.measure import GATE_EPS, GRADIENT_TOLERANCE, PARAMETER_TOLERANCE
from fourfold.verify.oracles import reduced
from fourfold.verify.uneven import sharpened, with_optimizer

KEYS = ("cp", "dp_shard", "dp_replicate", "tp", "zero", "recompute", "micro_batch", "accumulation")


def legal(spec, world, *wanted):
    """Those legal layouts of which the words are `wanted`."""
    found = [layout for layout in layouts(reduced(spec, world)[0], world).legal if words(layout) in wanted]
    assert len(found) == len(wanted), [
        words(layout) for layout in layouts(reduced(spec, world)[0], world).legal
    ]
    return found


@pytest.fixture
def of_every_axis(spec_file, tmp_path, capsys):
    """The shipped command on two ranks: each axis alone."""
    code = main(
        ["verify", "equal", str(spec_file), "--world", "2", "--all", "--out", str(tmp_path), "--json"]
    )
    printed = capsys.readouterr()
    return code, json.loads(printed.out), printed.err


def test_each_axis_alone_on_two_ranks(of_every_axis, tmp_path, capsys):
    code, document, told = of_every_axis
    assert (code, document["verdict"], document["products"]) == (0, "pass", 7)
    assert 7 < document["count"] < 40
    assert (document["schema"], document["world"], document["steps"]) == ("fourfold.verify.equal/1", 2, 3)
    assert 0.0 < document["worst_relative"] < GRADIENT_TOLERANCE
    names = [layout["words"] for layout in document["layouts"]]
    assert len(set(names)) == len(names)
    assert set(names) > {
        "dp_replicate 2",
        *(f"dp_shard 2, zero {z}" for z in (1, 3)),
        "tp 2",
        "cp 2",
        "cp 2, zero 3",
        "pp 2",
    }
    met = {(layout["cp_method"], layout["recompute"]) for layout in document["layouts"] if layout["cp"] == 2}
    assert met == set(product(("gather", "ring", "ulysses"), ("none", "full", "selective")))
    assert {layout["accumulation"] for layout in document["layouts"]} == {1, 2, 4, 8}
    assert all(layout["seconds"] > 0.0 for layout in document["layouts"])
    assert {refused["family"] for refused in document["refused"]} >= {"dp_shard 2, zero 0"}
    count = document["count"]
    assert f"[{count}/{count}] " in told and "pass, worst" in told and f"{count} layouts, worst" in told
    for forced in (
        "data.sequence 64 -> 32",
        "frozen",
        "two documents",
        "unused_parameters",
        "only those rows",
    ):
        assert any(forced in change for change in document["changes"]), forced
    sharp = [f["verdict"] for f in document["findings"] if "the check is sharp" in f["claim"]]
    assert sharp == ["pass"] * 4
    assert (tmp_path / "findings" / "equal-layouts.json").exists()
    one = next(layout for layout in document["layouts"] if layout["words"].endswith(", 4 microbatches"))
    code = main([*shlex.split(one["command"])[1:], "--out", str(tmp_path), "--json"])
    again = json.loads(capsys.readouterr().out)
    assert (code, again["verdict"], again["adversarial"], again["steps"]) == (0, "pass", True, 3)
    assert {k: again["layouts"][0][k] for k in KEYS} == {k: one[k] for k in KEYS}


def test_every_two_axes_on_four_ranks(small, tmp_path):
    spec = small()
    pairs = legal(
        spec,
        4,
        "dp_replicate 2 × dp_shard 2, zero 3",
        "dp_replicate 2 × cp 2",
        "dp_replicate 2 × tp 2, sp",
        "dp_shard 2 × cp 2, zero 3",
        "dp_shard 2 × tp 2, zero 2, sp",
        "cp 2 × tp 2, zero 1, sp",
        "pp 2 × dp_replicate 2",
        "pp 2 × dp_shard 2, zero 3",
        "pp 2 × cp 2, zero 2",
        "pp 2 × tp 2, sp",
    )
    document = verify_every_layout(spec, 4, steps=2, only=pairs, out=tmp_path)
    assert document["verdict"] == "pass", [layout["failed"] for layout in document["layouts"]]
    assert document["count"] == 10


def test_a_layout_that_fails_is_told_from_one_that_does_not(small, tmp_path):
    said = []
    document = verify_every_layout(
        small(),
        2,
        steps=2,
        only=legal(small(), 2, "tp 2", "tp 2, sp"),
        out=tmp_path,
        setup="tests.verify.faults.layout_faults:dropout_by_place_in_the_slice",
        repeat=lambda sets: f"again {' '.join(sets)}",
        say=said.append,
    )
    assert document["verdict"] == "fail"
    plain, cut = document["layouts"]
    assert (plain["words"], plain["verdict"], plain["failed"]) == ("tp 2", "pass", [])
    assert (cut["words"], cut["verdict"]) == ("tp 2, sp", "fail")
    assert cut["first_deviation"]["place"] == "blocks.0.attention_norm"
    finding = next(f for f in document["findings"] if f["claim"] == "tp 2, sp")
    assert "forward of blocks.0.attention_norm" in finding["measured"]
    assert "layout.sp=true" in finding["command"] and document["first_deviation"] == cut["first_deviation"]
    assert any("FAIL" in line and "attention_norm" in line for line in said)


@pytest.mark.parametrize(
    "layout",
    [
        ("layout.tp=2", "layout.sp=true"),
        ("layout.dp_shard=2", "layout.zero=3"),
        ("layout.tp=2", "layout.sp=true", "layout.recompute=selective"),
        ("layout.dp_shard=2", "layout.zero=3", "layout.recompute=full"),
    ],
)
def test_nothing_deviates_in_the_trace_of_a_layout_that_is_right(small, tmp_path, layout):
    spec, _ = sharpened(settle(small(*layout, "data.sequence=32", "batch.micro_batch=2"), 2))
    case, _ = prepared(with_optimizer(spec, eps=GATE_EPS), 2, 2, True, ())
    ranks = Ranks(2, None, 60.0)
    try:
        assert search(case.at(tmp_path), ranks, 2, PARAMETER_TOLERANCE) is None
    finally:
        ranks.close()
    for rank in range(2):
        lines = [
            json.loads(line) for line in (tmp_path / "trace" / f"rank{rank}.jsonl").read_text().splitlines()
        ]
        assert lines[0]["counts"] == (rank == 0 or "layout.tp=2" not in layout)
        known = {(x["kind"], x["name"]): bool(x["values"]) for x in lines if "kind" in x}
        assert {x["call"] for x in lines if x.get("kind") == "forward"} == {0}, "no module but once"
        for name in (
            "embedding",
            "blocks.0.attention.key",
            "blocks.0.ffn.up",
            "blocks.1.ffn.down",
            "(the model)",
        ):
            assert known["forward", name] and known["backward", name], name
        assert [x["stage"] for x in lines if "stage" in x].count("update") == 2


def test_a_model_of_another_kind_is_judged_as_it_is(small, tmp_path):
    mlp = ('model.kind="mlp"', "model.inputs=8", 'data.kind="synthetic"', "data.samples=64")
    spec = small(*mlp)
    document = verify_every_layout(spec, 2, steps=2, only=legal(spec, 2, "dp_shard 2, zero 3"), out=tmp_path)
    assert document["verdict"] == "pass", document["layouts"][0]["failed"]
    assert not document["adversarial"]
    assert any(f["claim"] == "the adversarial model" and f["kind"] == "open" for f in document["findings"])


def test_a_layout_that_the_model_itself_refuses_is_no_failed_check(small, tmp_path):
    own = (
        'model={kind="import", target="tests.verify.own_model:sometimes"}',
        "layout.unused_parameters=true",
    )
    data = 'data={kind="synthetic", samples=64, inputs=4, outputs=1, task="regression"}'
    spec = small(*own, data)
    only = legal(spec, 2, "dp_replicate 2", "tp 2")
    document = verify_every_layout(spec, 2, steps=1, only=only, out=tmp_path)
    assert (document["verdict"], document["count"]) == ("pass", 1)
    assert {one["words"]: one["verdict"] for one in document["layouts"]} == {
        "dp_replicate 2": "pass",
        "tp 2": "refused",
    }
    assert document["worst_relative"] < GRADIENT_TOLERANCE
    (told,) = [f for f in document["findings"] if f["claim"] == "tp 2"]
    assert told["verdict"] == "open" and "sharding" in str(told)
    with pytest.raises(SpecError, match="sharding"):
        verify_every_layout(spec, 2, steps=1, only=only[1:], out=tmp_path)
    table = layouts_table(document["layouts"])
    assert re.search(r"refused +- +[0-9.]+ +tp 2", table)


def test_requests_without_a_layout(small, tmp_path):
    with pytest.raises(SpecError, match="every legal layout of 2 ranks"):
        verify_every_layout(small(), 2, only=(), out=tmp_path)
    with pytest.raises(SpecError, match="--steps 0"):
        verify_every_layout(small(), 2, steps=0, out=tmp_path)
    for world in (0, -2):
        with pytest.raises(SpecError, match="rank"):
            verify_every_layout(small(), world, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refuses", ["every", "cut"])
def test_what_the_ranks_of_every_layout_refuse_is_no_failed_check(small, tmp_path, refuses):
    def judged():
        wanted = legal(small(), 2, "tp 2", "tp 2, sp")
        setup = f"tests.verify.test_every_layout:refuse_{refuses}"
        return verify_every_layout(small(), 2, steps=1, only=wanted, out=tmp_path / "out", setup=setup)

    if refuses == "every":
        with pytest.raises(SpecError) as refused:
            judged()
        assert refused.value.problems == (REFUSED,)
        assert list(tmp_path.iterdir()) == []
        return
    plain, cut = judged()["layouts"]
    assert (plain["verdict"], cut["verdict"]) == ("pass", "fail")
    assert "no such device" in cut["failed"][0]["measured"] and cut["first_deviation"] is None


REFUSED = Problem("a layout", "no such device", "each rank needs one", "another")


def test_a_rank_that_is_killed_leaves_its_layout_not_compared_and_the_others_judged(small, tmp_path):
    said = []
    spec = small("model.tied=false")
    only = legal(spec, 2, "tp 2", "tp 2, sp")
    setup = "tests.verify.test_every_layout:killed_in_the_cut_one"
    more = {"only": only, "out": tmp_path, "setup": setup, "say": said.append}
    document = verify_every_layout(spec, 2, steps=2, **more)
    assert document["verdict"] == "fail"
    assert [layout["verdict"] for layout in document["layouts"]] == ["pass", "fail"]
    assert any("tp 2, sp: FAIL, not compared" in line for line in said)
    assert any("killed by SIGKILL" in f["measured"] for f in document["findings"] if f["verdict"] == "fail")
    assert [f["claim"] for f in document["findings"] if f["verdict"] == "open"][-1] == "a head of its own"


def killed_in_the_cut_one():
    from fourfold.train import setup

    opened = setup.open_training

    def killed(spec, *args, **more):
        if spec.layout.sp:
            os.kill(os.getpid(), signal.SIGKILL)
        return opened(spec, *args, **more)

    setup.open_training = killed


def refuse_every(sequence=(False, True)):
    from fourfold.train import setup

    opened = setup.open_training

    def refused(spec, *args, **more):
        if spec.layout.sp in sequence:
            raise SpecError(REFUSED)
        return opened(spec, *args, **more)

    setup.open_training = refused


def refuse_cut():
    refuse_every((True,))


def test_a_layout_in_words_and_as_settings(small):
    one = settle(small("layout.dp_shard=2", "layout.zero=3", "layout.tp=2", "layout.sp=true"), 4)
    assert words(one.layout) == "dp_shard 2 × tp 2, zero 3, sp"
    assert words(settle(small(), 1).layout) == "one rank"
    again = settle(small(*settings(one)), 4)
    assert (again.layout, again.batch) == (one.layout, one.batch)
    keep = ("layout.recompute=selective", 'layout.recompute_keep=["bmm"]')
    one = settle(small(*keep), 2)
    assert words(one.layout) == "dp_replicate 2, recompute selective"
    again = settle(small(*settings(one)), 2)
    assert (again.layout, again.batch) == (one.layout, one.batch)


def told(document, what, capsys):
    """Its count and its worst, printed."""
    longest = max(one["seconds"] for one in document["layouts"])
    with capsys.disabled():
        print(
            f"\n{what} on {document['world']} ranks: {document['count']} layouts, worst "
            f"{document['worst_relative']:.2e}, {document['seconds_per_layout']:.2f} s a layout, "
            f"at most {longest:.1f} s"
        )
    assert document["verdict"] == "pass", [one["failed"] for one in document["layouts"] if one["failed"]]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_layout_of_data_and_tensor_parallel(tmp_path, capsys, world):
    """Each legal one, with every zero, with and without sp: not a choice of them."""
    spec = load_spec("tiny").spec
    legal = layouts(reduced(spec, world)[0], world).legal
    asked = [layout for layout in legal if layout.cp == layout.pp == 1]
    document = verify_every_layout(spec, world, only=asked, out=tmp_path)
    told(document, "tiny, data and tensor parallel", capsys)
    assert document["count"] == {2: 6, 4: 17, 8: 32}[world]
    assert document["worst_relative"] <= GRADIENT_TOLERANCE


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
def test_the_whole_gate(tmp_path, capsys, name, world):
    document = verify_every_layout(load_spec(name).spec, world, out=tmp_path)
    told(document, name, capsys)
    assert document["count"] >= {2: 30, 4: 60, 8: 110}[world]
    assert document["worst_relative"] <= GRADIENT_TOLERANCE
