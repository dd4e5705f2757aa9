"""Sharding tables that are wrong: told in words, with the entry to write, or as right as one device."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from fourfold.launch.pool import RankPool
from fourfold.models.protocol import Heads, Rule
from fourfold.parallel.trail import Joined, Trail, held_back
from tests.parallel import table_jobs
from tests.parallel.table_jobs import HEADS, WIDTH

ROW = '{"blocks.*.output.weight": "row", "blocks.*.output.bias": "replicate"} in the model\'s sharding()'


def every(names: tuple[str, ...], rule: Rule) -> dict[str, Rule]:
    return {f"blocks.*.{name}.*": rule for name in names}


def both(name: str, rule: Rule) -> dict[str, Rule]:
    return {f"blocks.*.{name}.{part}": rule for part in ("weight", "bias")}


QKV = ("query", "key", "value")
WRONG: list[tuple[int, dict[str, Rule], list[str]]] = [
    (
        2,
        every(("query",), "column"),
        [
            "The size of tensor",
            "table_jobs.py:",
            '"blocks.0.query": "column" gives one tensor that is cut between ranks',
            '"blocks.0.key", "blocks.0.value": Heads(4) gives each rank its own part, a plain tensor',
            'type:  {"blocks.*.query.*": Heads(4)} in',
        ],
    ),
    (2, every(("query",), "replicate"), ["whole on every rank", 'type:  {"blocks.*.query.*": Heads(4)} in']),
    (2, every(("value",), "replicate"), ['type:  {"blocks.*.value.*": Heads(4)} in']),
    (2, every(QKV, "column"), ["sharding strategy", '"blocks.*.value.*": Heads(n)}  (n: its heads)']),
    (2, {"blocks.*.output.weight": "replicate"}, ["differs from rank to rank", f"type:  {ROW}"]),
    (2, both("output", "column"), ["blocks.0.output", f"type:  {ROW}"]),
    (2, both("output", Heads(4)), [f"type:  {ROW}"]),
    (
        2,
        both("down", Heads(8)),
        ['type:  {"blocks.*.down.weight": "row", "blocks.*.down.bias": "replicate"}'],
    ),
    (4, every(QKV, Heads(2)), ["type:  --set layout.tp=2 "]),
    (4, every(("value",), Heads(2)), ['type:  {"blocks.*.value.*": Heads(4)} in']),
    (
        2,
        every(("query",), Heads(3)),
        ["8 outputs, which make no 3 equal parts", "type:  Heads(4) or Heads(2)"],
    ),
    (4, every(("query",), Heads(1)) | every(("up",), Heads(6)), ["6 parts for 4 ranks", "--set layout.tp=3"]),
    (2, {"blocks.*.norm.*": Heads(4)}, ['Heads(4) for "blocks.0.norm"', '"blocks.*.norm.*": "replicate"']),
    (
        2,
        {"head.weight": Heads(32)},
        ["the network's output", '"head" gives each rank its own Heads', '{"head.*": "vocabulary"}'],
    ),
]


@pytest.mark.parametrize(("tp", "change", "said"), WRONG, ids=[str(wrong[1]) for wrong in WRONG])
def test_a_table_that_cannot_be_is_told_with_the_entry_to_write(ranks, tp, change, said):
    for text in ranks(tp).run(table_jobs.told, change, {"tp": tp}, {}):
        assert all(words in text for words in said), text
        assert all(part in text for part in ("found: ", "why:   ", "type:  "))
        assert "Traceback" not in text


def test_features_that_do_not_fit_on_one_device_either_are_not_laid_to_the_table():
    with RankPool(2, timeout_s=60) as pool:  # of its own: forwards end in torch's midst there
        assert pool.run(table_jobs.misfit) == [["RuntimeError"] * 3] * 2


def test_what_torch_logs_is_held_back_only_until_it_is_told_otherwise(caplog):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's loggers do not propagate
    try:
        with held_back() as logged:
            logger.error("told in our words")
            logged.clear()
            logger.error("told by torch alone")
            assert not caplog.messages
        logger.error("afterwards")
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == ["told by torch alone", "afterwards"]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(
    "change",
    [{}, {"head.weight": "replicate"}, {"embedding.weight": "replicate"}, {"blocks.*.norm.*": "column"}],
    ids=str,
)
def test_a_table_that_gains_less_is_still_right(ranks, change, sp):
    assert ranks(2).run(table_jobs.told, change, {"tp": 2, "sp": sp}, {}) == ["equal"] * 2


@pytest.mark.parametrize("sp", [False, True])
def test_a_network_that_has_a_parameter_of_its_own_beside_its_embedding_is_right(ranks, sp):
    layout, made = {"tp": 2, "sp": sp}, {"places": True}
    assert ranks(2).run(table_jobs.told, {"places": "replicate"}, layout, made) == ["equal"] * 2


DOWN = '{"blocks.*.down.weight": "row", "blocks.*.down.bias": "replicate"}'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blocks.*.down.weight": "replicate"}, ['"blocks.0.down", "replicate", takes what a column', DOWN]),
        (both("down", "column"), ['"blocks.0.down", "column", takes what a column', DOWN]),
        (
            every(("up",), "replicate"),
            ['"blocks.0.down", "row", takes what no col', '{"blocks.*.up.*": "column"}'],
        ),
    ],
    ids=str,
)
def test_half_a_pair_is_right_but_for_sequence_parallel_which_refuses_it_on_every_rank(ranks, change, said):
    assert ranks(2).run(table_jobs.told, change, {"tp": 2}, {}) == ["equal"] * 2
    for text in ranks(2).run(table_jobs.told, change, {"tp": 2, "sp": True}, {}):
        assert all(words in text for words in ["layout.sp = true", "--set layout.sp=false", *said]), text


def test_a_bias_that_is_cut_otherwise_than_the_outputs_is_refused(ranks):
    for name, rule, right in (("output", "column", "replicate"), ("up", "replicate", "column")):
        change = both(name, "row" if name == "output" else "column") | {f"blocks.*.{name}.bias": rule}
        for text in ranks(2).run(table_jobs.told, change | {f"blocks.*.{name}.*": None}, {"tp": 2}, {}):
            assert f'"{rule}" for blocks.0.{name}.bias' in text
            assert f'type:  {{"blocks.*.{name}.bias": "{right}"}} in' in text


def test_a_number_of_heads_that_is_not_read_off_the_shape_is_told(ranks):
    for text in ranks(2).run(table_jobs.told, {}, {"tp": 2}, {"heads": 4}):
        assert "invalid for input of size" in text and "their sizes read off the shapes" in text


def test_a_plain_tensor_that_meets_the_stream_of_a_model_with_heads_is_told(ranks):
    for text in ranks(2).run(table_jobs.told, {}, {"tp": 2}, {"masked": True}):
        assert '"embedding": "vocabulary" gives what is whole on every rank (a DTensor)' in text
        assert "plain tensors of your own between Heads and row only" in text


@pytest.mark.parametrize("scales", [(), (WIDTH // HEADS,), (1, WIDTH // HEADS)], ids=str)
def test_a_parameter_of_the_block_itself_between_heads_and_row_is_named(ranks, scales):
    change: dict[str, Rule] = {"blocks.*.scale": "replicate", "places": "replicate"}
    for text in ranks(2).run(
        table_jobs.told, change, {"tp": 2}, {"scaled": "between", "scales": scales, "places": True}
    ):
        assert "mixed torch.Tensor and DTensor" in text and "table_jobs.py:" in text
        assert '"blocks.0.value": Heads(4) gives each rank its own part, a plain tensor' in text
        assert '; "blocks.0.scale" is a parameter (a DTensor)' in text
        assert 'type:  "blocks.0.scale" before the Heads or after the row' in text
        assert "places" not in text, "it is not read there"


def test_a_parameter_of_two_dims_beside_the_heads_is_no_linear_of_the_table():
    attention = nn.Module()
    attention.query, attention.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(HEADS, 2))
    trail = Trail(2, sequence=False)
    trail.note(Joined.of("attention", "replicate", attention), None)
    trail.note(Joined.of("attention.query", Heads(HEADS), attention.query), None)
    refused = trail.fault(RuntimeError("aten.mul.Tensor got mixed torch.Tensor and DTensor"))
    assert refused is not None
    assert refused.problems[0].instead.startswith('"attention.scale" before the Heads or after the row')


APART = "The size of tensor a (8) must match the size of tensor b (4)"
IN_4, IN_8 = (
    "shape '[2, 32, -1, 4]' is invalid for input of size 256",
    "sizes [-1, 8] don't multiply up to the size",
)


@pytest.mark.parametrize(
    ("error", "heads", "right"),
    [
        (IN_8, {"query": (32, 4), "key": (16, 4)}, {"key": 2}),  # heads of 8: key has 2 of them
        (APART, {"query": (32, 4), "key": (16, 4)}, {"key": 2}),
        (APART, {"query": (32, 4), "key": (16, 4), "value": (16, 2)}, {"key": 2}),
        (APART, {"query": (32, 8), "key": (16, 2), "value": (16, 2)}, {"query": 4}),
        (IN_8, {"query": (32, 4), "key": (16, 4), "value": (16, 4)}, {"key": 2, "value": 2}),
        (IN_4, {"query": (32, 4), "key": (16, 4), "value": (16, 4)}, {"query": 8}),
        ("aten.mul got mixed torch.Tensor and DTensor", {"query": (32, 4), "key": (16, 0)}, {"key": 2}),
    ],
)
def test_heads_of_another_width_than_the_others_are_in_doubt(monkeypatch, error, heads, right):
    monkeypatch.setattr("fourfold.parallel.trail.DTensor", SimpleNamespace)
    stream = SimpleNamespace(ndim=3, shape=(2, 4, 32), placements=[Replicate()])
    trail = Trail(4, sequence=False)
    for name, (outputs, units) in heads.items():
        rule: Rule = Heads(units) if units else "column"
        trail.note(Joined.of(f"blocks.0.{name}", rule, nn.Linear(32, outputs)), stream)
    refused = trail.fault(RuntimeError(error))
    assert refused is not None
    table = ", ".join(f'"blocks.*.{name}.*": Heads({units})' for name, units in right.items())
    assert refused.problems[0].instead == f"{{{table}}} in the model's sharding()"


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("scaled", ["before", "after"])
def test_before_the_heads_and_after_the_row_it_is_right(ranks, scaled, sp):
    change: dict[str, Rule] = {"blocks.*.scale": "replicate", "places": "replicate"}
    made = {"scaled": scaled, "places": True}
    assert ranks(2).run(table_jobs.told, change, {"tp": 2, "sp": sp}, made) == ["equal"] * 2


def test_a_wrong_table_is_told_before_a_parameter_of_the_block_itself(ranks):
    change = every(("query",), "replicate") | {"blocks.*.scale": "replicate"}
    for text in ranks(2).run(table_jobs.told, change, {"tp": 2}, {"scaled": "after"}):
        assert 'type:  {"blocks.*.query.*": Heads(4)} in' in text and "scale" not in text


def test_one_tensor_of_two_rules_is_refused(ranks):
    for text in ranks(2).run(table_jobs.told, {"head.weight": "row"}, {"tp": 2}, {"tied": True}):
        assert 'sharding rules "vocabulary" for embedding.weight and "row" for head.weight' in text
        assert "(tied)" in text and 'type:  {"head.weight": "vocabulary"}' in text


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"dp_replicate": 1, "tp": 2}),
    (2, {"dp_replicate": 1, "tp": 2, "sp": True}),
    (2, {"dp_replicate": 2}),
    (2, {"dp_replicate": 1, "dp_shard": 2, "zero": 3}),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_a_layer_that_took_no_part_is_refused_on_every_layout(ranks, world, layout):
    for text in ranks(world).run(table_jobs.idle_layer, layout, False):
        assert "took no part in backward: idle." in text and "idle.weight" in text
        assert "--set layout.unused_parameters=true" in text
    assert ranks(world).run(table_jobs.idle_layer, layout, True) == ["idle.weight, idle.bias"] * world


def test_and_on_one_device():
    text = table_jobs.idle_layer({"dp_replicate": 1}, False)
    assert "took no part in backward: idle.weight, idle.bias" in text
    assert table_jobs.idle_layer({"dp_replicate": 1}, True) == "idle.weight, idle.bias"
