"""The layouts chosen: every product of degrees, every two settings that are legal together; and nothing illegal."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import pytest

from fourfold.spec.layouts import layouts
from fourfold.spec.load import load_spec
from fourfold.spec.rules import check
from fourfold.spec.settle import settle
from fourfold.spec.training import LayoutSpec
from fourfold.verify.covering import CUTS, Choice, choose
from fourfold.verify.oracles import depth, reduced

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


def small(name, *sets, world=4):
    return reduced(load_spec(name, sets).spec, world)[0]


@cache
def chosen_of(name, world):
    return choose(small(name, world=world), world)


def pairs(choices):
    return {pair for choice in choices for pair in combinations(choice.values, 2)}


@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_product_of_degrees_with_its_lowest_and_highest_zero(name, world):
    spec, chosen = small(name, world=world), chosen_of(name, world)
    stages = {}
    for layout in layouts(spec, world).legal:
        stages.setdefault(tuple(getattr(layout, axis) for axis in DEGREES), set()).add(layout.zero)
    judged = {}
    for choice in chosen.products:
        assert not choice.layout.sp and choice.layout.recompute == "none" and choice.cut == 2
        judged.setdefault(tuple(getattr(choice.layout, axis) for axis in DEGREES), []).append(
            choice.layout.zero
        )
    assert judged == {degrees: sorted({min(zeros), max(zeros)}) for degrees, zeros in stages.items()}


def test_every_two_settings_that_are_legal_together_are_judged_together():
    """Against every legal layout of four ranks with every value of its options, by the rules themselves."""
    spec = small("tiny", world=4)
    chosen = choose(spec, 4)
    legal = []
    options = product(
        ("1f1b", "gpipe", "interleaved-1f1b", "zbv", "dualpipe-v"),
        ("gather", "ring", "ulysses"),
        ("none", "full", "selective"),
    )
    for schedule, method, recompute in options:
        more = {"pp_schedule": schedule, "cp_method": method, "recompute": recompute}
        of_options = spec.model_copy(update={"layout": spec.layout.model_copy(update=more)})
        for layout in layouts(of_options, 4).legal:
            legal += [Choice(layout, cut) for cut in CUTS if not check(Choice(layout, cut).of(spec))]
    missing = pairs(legal) - pairs(chosen.all)
    assert len(pairs(legal)) > 400 and not missing
    assert len(pairs(chosen.all)) == chosen.pairs


@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
def test_each_is_legal_and_chosen_once(name):
    spec = small(name, world=8)
    chosen = chosen_of(name, 8)
    for choice in chosen.all:
        whole = settle(choice.of(spec), 8)
        assert not check(whole), (choice, check(whole))
        assert (whole.batch.global_batch, whole.batch.accumulation) == (32, choice.cut * choice.layout.pp)
    assert len({choice.values for choice in chosen.all}) == len(chosen.all)


def test_a_gate_of_eight_ranks_is_wide_enough():
    wide = [chosen_of(name, 8) for name in ("tiny", "moe-tiny")]
    assert sum(len(chosen.all) for chosen in wide) >= 120


def test_the_options_of_the_spec_are_those_of_its_products():
    own = ('layout.cp_method="ring"', 'layout.pp_schedule="gpipe"', 'layout.recompute="full"')
    chosen = choose(small("tiny", *own, world=2), 2)
    assert {choice.layout.recompute for choice in chosen.products} == {"full"}
    assert {c.layout.pp_schedule for c in chosen.products if c.layout.pp > 1} == {"gpipe"}
    assert {c.layout.cp_method for c in chosen.products if c.layout.cp > 1} == {"ring"}
    split = choose(small("tiny", "layout.pp_split=[3,1]", world=2), 2)
    assert {c.layout.pp_split for c in split.products if c.layout.pp > 1} == {(3, 1)}
    assert {c.layout.pp_schedule for c in split.covering if c.layout.pp > 1} > {"gpipe", "zbv"}


@pytest.mark.parametrize(
    ("world", "length", "judged"),
    [(2, 128, 32), (3, 36, 30), (6, 144, 24), (8, 128, 32), (5, 150, 30), (64, 256, 128), (2, 16, 16)],
)
def test_a_sequence_is_cut_short_so_that_every_layout_still_cuts_it(world, length, judged):
    spec = small("tiny", f"data.sequence={length}", world=world)
    assert spec.data.sequence == judged


def test_a_model_of_another_kind():
    mlp = ('model={kind="mlp", inputs=8}', 'data={kind="synthetic", samples=64}')
    chosen = choose(small("tiny", *mlp, world=2), 2)
    assert all(choice.layout.cp == 1 for choice in chosen.all) and len(chosen.all) > 7


@pytest.mark.parametrize(
    ("layers", "sets", "layout", "judged"),
    [
        (4, (), {}, 2),
        (1, (), {}, 1),
        (4, (), {"pp": 2}, 2),
        (8, (), {"pp": 4}, 4),
        (8, (), {"pp": 2, "pp_schedule": "zbv"}, 4),
        (8, (), {"pp": 2, "pp_schedule": "interleaved-1f1b", "pp_virtual": 3}, 6),
        (7, (), {"pp": 2, "pp_split": (4, 3)}, 7),
        (4, ("model.moe={experts=4, top_k=2, first_dense_layers=2}",), {}, 3),
    ],
)
def test_a_decoder_is_judged_on_the_fewest_layers(layers, sets, layout, judged):
    spec = small("tiny", f"model.layers={layers}", *sets)
    assert depth(spec, LayoutSpec(**layout)) == judged
