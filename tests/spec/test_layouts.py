"""The list of layouts holds every legal one once, and no other; what is told instead of an illegal one is legal."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fourfold.spec.degrees import divisors
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.fit import SETTINGS, settings_of
from fourfold.spec.grid import AXES, BORROWED
from fourfold.spec.layouts import layouts
from fourfold.spec.legal import Judge, about_degrees, settings_in
from fourfold.spec.load import load_spec
from fourfold.spec.rules import RULES, check, require
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec
from tests.spec.test_rules import LLAMA

unhurried = settings(deadline=None, max_examples=60)
MLP = ("model.kind=mlp", "data.kind=synthetic", "batch.global_batch=24")
IMPORT = ("model.kind=import", "model.target=a:b")
TOKENS = ("data.kind=tokens", "data.path=x")
SPECS: list[Sequence[str]] = [
    (),
    ("model.heads=6", "model.kv_heads=3", "model.head_width=16"),
    ("model.ffn_width=66",),
    (*TOKENS, "model.vocabulary=3"),
    MLP,
    (*MLP, "model.hidden=9"),
    IMPORT,
    ("layout.zero=3", "layout.wrap=2"),
    ("precision.reduce=bf16",),
    ("batch={micro_batch=2}",),
]
WORLDS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16])


def spec_of(sets: Sequence[str]) -> Spec:
    return load_spec("tiny", sets).spec


def mesh(world: int, draw: st.DrawFn) -> dict[str, Any]:
    """Any settings that fill `world`, in the canonical form."""
    degrees: dict[str, Any] = {}
    left = world
    for axis in AXES[1:]:
        degrees[axis] = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        left //= degrees[axis]
    degrees[AXES[0]] = left
    borrowed = prod(degrees[axis] for axis in BORROWED)
    degrees["ep"] = draw(st.sampled_from([d for d in range(1, borrowed + 1) if borrowed % d == 0]))
    sharded = degrees["dp_shard"] * degrees["cp"] > 1
    degrees["zero"] = draw(st.integers(0, 3)) if sharded else 0
    degrees["sp"] = draw(st.booleans()) if degrees["tp"] > 1 else False
    return degrees


def legal_in(spec: Spec, world: int) -> bool:
    try:
        require(settle(spec, world), "train")
    except SpecError:
        return False
    return True


# -------------------------------------------------------------------------------------------------------- list


@unhurried
@given(st.sampled_from(SPECS), WORLDS)
def test_every_listed_layout_is_legal_and_none_is_listed_twice(sets: Sequence[str], world: int) -> None:
    spec = spec_of(sets)
    listed = layouts(spec, world)
    assert len(set(listed.legal)) == len(listed.legal)
    for layout in listed.legal:
        own = spec.model_copy(update={"layout": layout})
        assert check(own, "train") == []
        assert settle(own, world).layout == layout


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(SPECS), WORLDS, st.data())
def test_what_is_not_listed_is_refused(sets: Sequence[str], world: int, data: st.DataObject) -> None:
    spec = spec_of(sets)
    asked = spec.layout.model_copy(update=data.draw(st.composite(lambda draw: mesh(world, draw))()))
    listed = layouts(spec, world)
    assert (asked in listed.legal) == legal_in(spec.model_copy(update={"layout": asked}), world)


@unhurried
@given(st.sampled_from(SPECS), st.sampled_from([1, 2, 4, 6, 8]))
def test_every_layout_is_listed_or_counted(sets: Sequence[str], world: int) -> None:
    """How many there are of a world, whatever the Spec, is a matter of arithmetic."""
    listed = layouts(spec_of(sets), world)
    total = len(listed.legal) + sum(refused.count for refused in listed.refused)
    assert total == sum(
        len(divisors(shard * cp * tp)) * (4 if shard * cp > 1 else 1) * (2 if tp > 1 else 1)
        for pp, replicate, shard, cp, tp in product(divisors(world), repeat=5)
        if pp * replicate * shard * cp * tp == world
    )
    assert all(refused.count > 0 and refused.family for refused in listed.refused)
    assert len({refused.rule for refused in listed.refused}) == len(listed.refused)


def test_tiny_on_eight_ranks() -> None:
    listed = layouts(spec_of(()), 8)
    assert len(listed.legal) == 129
    told = {refused.rule: (refused.family, refused.owed) for refused in listed.refused}
    assert told == {
        "zero shards": ("dp_shard > 1, zero 0", "mathematics"),
        "ep needs experts": ("ep > 1", "mathematics"),
        "tp keeps heads whole": ("tp 8", "library"),
        "a layer for every rank of a pipeline": ("pp 8", "mathematics"),
    }
    tp_8 = next(refused for refused in listed.refused if refused.family == "tp 8")
    assert tp_8.problem.found.startswith("4 heads and 2 key/value heads")


def test_one_rank_has_one_layout() -> None:
    listed = layouts(spec_of(("layout.zero=3",)), 1)
    assert listed.legal == (LayoutSpec(dp_replicate=1),)
    assert listed.refused == ()


def test_a_batch_that_does_not_divide_is_a_family() -> None:
    listed = layouts(spec_of(()), 64)
    family = next(refused for refused in listed.refused if refused.rule == "batch divides")
    assert family.family == "data parallel > 8"
    assert family.problem.found == "48 / (2 x 16) = 1.5"
    assert layouts(spec_of(()), 5).legal == ()


def test_families_in_few_words() -> None:
    def family(sets: Sequence[str], world: int, rule: str) -> str:
        return next(each.family for each in layouts(spec_of(sets), world).refused if each.rule == rule)

    assert family((), 720, "tp keeps heads whole") == "tp not 1, 2, 4"
    assert family((*MLP, "model.hidden=9"), 6, "tp cuts the mlp") == "tp 2, 6"
    assert family(MLP, 2, "sp needs tokens") == "sp"
    assert family(("precision.reduce=bf16",), 4, "reduction of replicas").endswith("(some)")
    assert family(("run.exact=true",), 2, "exact without tp") == "tp 2"


def test_what_is_wrong_with_more_than_the_layout_refuses_all() -> None:
    listed = layouts(spec_of(("model.mtp_layers=1",)), 2)
    assert listed.legal == ()
    assert [(refused.family, refused.count) for refused in listed.refused] == [("model.mtp_layers", 22)]


def test_no_world() -> None:
    with pytest.raises(SpecError, match="at least one rank"):
        layouts(spec_of(()), 0)


def test_more_layouts_than_can_be_listed_are_refused_at_once() -> None:
    with pytest.raises(SpecError, match=r"236,250 products of 5 degrees(.|\n)*a world of 65536 ranks"):
        layouts(spec_of(()), 110880)
    with pytest.raises(SpecError, match="a world of 262144 ranks"):
        layouts(spec_of(()), 10**9)


def test_where_a_world_has_very_many_divisors_the_nearest_is_still_told() -> None:
    (problem,) = [one for one in told(["layout.tp=17"], 240240) if "heads" in one.asked]
    assert problem.instead == "--set layout.tp=4 --set batch.global_batch=120120"


# ------------------------------------------------------------------------------------------------------- rules


OTHERS = st.fixed_dictionaries(
    {
        "prefetch": st.sampled_from([0, 9]),  # more than there are units
        "wrap": st.sampled_from([1, 2, 99]),
        "offload": st.sampled_from(["none", "cpu", "disk"]),
    }
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(SPECS), OTHERS, WORLDS, st.data())
def test_a_rule_reads_no_setting_of_the_layout_that_it_does_not_name(
    sets: Sequence[str], others: dict[str, Any], world: int, data: st.DataObject
) -> None:
    """Verdicts are kept by the settings that a rule names."""
    spec = spec_of(sets)
    spec = spec.model_copy(update={"layout": spec.layout.model_copy(update=others)})
    meshes = st.composite(lambda draw: mesh(world, draw))()
    one, other = data.draw(meshes), data.draw(meshes)
    for rule in RULES:
        mixed = one | {name: other[name] for name in settings_in(rule)}
        verdicts = [
            rule.applies(spec.model_copy(update={"layout": spec.layout.model_copy(update=settings)}))
            for settings in (mixed, other)
        ]
        assert verdicts[0] == verdicts[1], rule.name


def test_a_judge_forgets_nothing_and_mixes_nothing_up() -> None:
    spec = spec_of(())
    judge = Judge(spec, RULES)
    for _ in range(2):
        for layout in layouts(spec, 4).legal:
            assert judge(settings_of(layout))
        refused = judge.refusing(settings_of(LayoutSpec(dp_replicate=1, tp=3)))
        assert refused is not None
        assert refused.name == "tp keeps heads whole"
    assert judge.refusing(settings_of(LayoutSpec(dp_replicate=1, tp=3)), within=("pp", "cp")) is None


def test_a_refusal_owed_to_a_library_says_so() -> None:
    broken = {
        "tp keeps heads whole": ["layout.tp=3"],
        "tp cuts the feed-forward": ["model.ffn_width=65", "layout.tp=2"],
        "tokens for every tp rank": [*TOKENS, "model.vocabulary=5", "layout.tp=4"],
        "reduction of replicas": [
            "precision.reduce=bf16",
            *("layout.zero=1", "layout.dp_shard=2", "layout.dp_replicate=2"),
        ],
        "draws that are ours": [*LLAMA, "model.args.attention_dropout=0.1"],
        "stages of transformers": [*LLAMA, "layout.pp=2"],
        "tp by the model's own plan": [*LLAMA, "model.architecture=mixtral", "layout.tp=2"],
        "tp cuts the configuration": [*LLAMA, "layout.tp=3"],
        "one backward of compiled blocks": [
            "layout.compile=blocks",
            *('layout.pp_schedule="zbv"', "layout.pp=2"),
        ],
        "parameters of split backwards": ['layout.pp_schedule="zbv"', "layout.pp=2", "layout.zero=2"],
    }
    assert {rule.name for rule in RULES if rule.owed == "library"} == set(broken)
    for sets in broken.values():
        with pytest.raises(SpecError, match=r"why: .*(torch|transformers)"):
            load_spec("tiny", sets)


# ------------------------------------------------------------------------------------------------------ advice


def told(sets: Sequence[str], world: int) -> tuple[Problem, ...]:
    """What a user who trains `sets` on `world` ranks is told."""
    try:
        loaded = load_spec("tiny", sets, world)
        require(settle(loaded.spec, world, loaded.provenance), "train", loaded.provenance)
    except SpecError as error:
        return error.problems
    return ()


def typed(instead: str) -> list[list[str]]:
    """The settings of each way out that is spelt as `--set`."""
    ways = re.split(r"\n\s+or  | or (?=--set)", instead)
    return [
        [word for word in shlex.split(re.sub(r"\(.*\)", "", way)) if word != "--set"]
        for way in ways
        if way.startswith("--set ")
    ]


def sets_of(layout: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [f"layout.{name}={str(layout[name]).lower()}" for name in names]


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(SPECS),
    WORLDS,
    st.fixed_dictionaries(
        {axis: st.sampled_from([1, 2, 3, 4]) for axis in SETTINGS if axis not in ("zero", "sp")}
        | {"zero": st.integers(0, 3), "sp": st.booleans()}
    ),
    st.sets(st.sampled_from(SETTINGS), max_size=4),
)
def test_what_is_told_instead_is_legal_for_the_same_world(
    sets: Sequence[str], world: int, layout: dict[str, Any], names: set[str]
) -> None:
    """Applied to what was typed it trains, but for an axis that is not built, where one was asked for already."""
    asked = [*sets, *sets_of(layout, sorted(names))]
    problems = told(asked, world)
    assume(problems)
    for problem in problems:
        if not problem.asked.startswith(("layout.", "train with layout.", "a layout for")):
            continue
        if "layout.wrap" in problem.asked:
            continue  # a problem of its own, with advice of its own: a setting of another kind
        ways = typed(problem.instead)
        assert ways or "a world of" in problem.instead
        for way in ways:
            left = [each for each in told([*asked, *way], world) if "layout.wrap" not in each.asked]
            assert all(each.asked.startswith("train with layout.") for each in left), (asked, world, way)
            assert not left or not problem.asked.startswith("train with"), (asked, world, way)
            built = all(layout[axis] == 1 for axis in ("ep",) if axis in names)
            assert not left or not built, (asked, world, way)


@pytest.mark.parametrize(
    ("sets", "world", "instead"),
    [
        (["layout.tp=3"], 4, ["layout.tp=4"]),
        (["layout.tp=8"], 8, ["layout.tp=4"]),
        (["layout.tp=8", "layout.dp_replicate=1"], 8, ["layout.dp_replicate=2", "layout.tp=4"]),
        (["layout.pp=8"], 8, ["layout.pp=4"]),
        (["layout.pp=8", "layout.dp_replicate=1"], 8, ["layout.dp_replicate=2", "layout.pp=4"]),
        (["layout.dp_shard=2"], 4, ["layout.dp_shard=1"]),
        (["layout.dp_shard=4"], 4, ["layout.zero=1"]),
        (["layout.zero=2", "layout.dp_replicate=4"], 4, ["layout.zero=0"]),
        (["layout.sp=true"], 3, ["layout.sp=false"]),
        (["layout.dp_replicate=3"], 8, ["layout.dp_replicate=8"]),
        (["layout.tp=5"], 5, ["layout.tp=1", "batch.global_batch=40"]),
    ],
)
def test_the_nearest_is_told(sets: Sequence[str], world: int, instead: list[str]) -> None:
    problem = told(sets, world)[0]
    assert typed(problem.instead)[0] == instead
    assert told([*sets, *instead], world) == ()


def test_only_what_is_about_degrees_is_told_in_degrees() -> None:
    others = {rule.name for rule in RULES if settings_in(rule) and not about_degrees(rule)}
    assert "units of zero" in others
    assert "reduction of replicas" in others
    assert "tp keeps heads whole" not in others
