"""The protocol's own two parts: the loss as a module, and the rule of each parameter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fourfold.data.batch import Batch
from fourfold.models.loss import cross_entropy, squared_error, wide
from fourfold.models.mlp import MlpKit
from fourfold.models.protocol import BatchLike, Heads, LossModule, Rule, parameter_rules, word
from fourfold.spec.errors import SpecError
from fourfold.spec.model import MlpSpec


class TableKit:
    """Nothing but a sharding table."""

    def __init__(self, table: dict[str, Rule]) -> None:
        self.table = table

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:  # noqa: ARG002
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def sharding(self) -> dict[str, Rule]:
        return self.table

    def blocks(self, module: nn.Module) -> tuple[str, ...]:  # noqa: ARG002
        return ()


def test_the_loss_module_is_the_kits_loss_and_holds_the_parameters(vectors: Callable[..., Batch]) -> None:
    kit = MlpKit(MlpSpec(kind="mlp", inputs=4))
    module = kit.build(0, torch.float64)
    batch = vectors(3, 4, torch.zeros(3, 1, dtype=torch.float64))
    wrapped = LossModule(kit, module)
    assert wrapped(batch) == kit.loss(module, batch)
    assert [id(p) for p in wrapped.parameters()] == [id(p) for p in module.parameters()]
    assert not wrapped.eval().module.training


def test_each_parameter_gets_the_rule_of_its_pattern() -> None:
    kit = TableKit({"*.weight": "column", "0.bias": "replicate", "1.bias": "column"})
    module = kit.build(0, torch.float32)
    assert parameter_rules(kit, module) == {
        "0.weight": "column",
        "0.bias": "replicate",
        "1.weight": "column",
        "1.bias": "column",
    }


def test_every_parameter_without_one_rule_is_named() -> None:
    kit = TableKit({"*.weight": "column", "1.*": "sideways"})  # type: ignore[dict-item]
    with pytest.raises(SpecError) as error:
        parameter_rules(kit, kit.build(0, torch.float32))
    problems = error.value.problems
    assert [problem.asked for problem in problems] == [
        'sharding rule "sideways" for "1.*"',
        'the sharding rule of parameter "0.bias"',
        'the sharding rule of parameter "1.weight"',
    ]
    assert "no pattern" in problems[1].found
    assert '"*.weight" and "1.*"' in problems[2].found


@pytest.mark.parametrize("units", ["x", 2.0, True, None, 0, [2]], ids=repr)
def test_heads_of_no_whole_number_are_refused_where_every_wrong_rule_is(units: object) -> None:
    kit = TableKit({"*.weight": Heads(units), "*.bias": "replicate"})  # type: ignore[arg-type]
    with pytest.raises(SpecError) as error:
        parameter_rules(kit, kit.build(0, torch.float32))
    (problem,) = error.value.problems
    typed = '"x"' if units == "x" else repr(units)
    assert problem.asked == f'sharding rule Heads({typed}) for "*.weight"'
    assert problem.found == f"{typed} as its number of units"
    assert problem.instead == "Heads(the number of heads)"


@pytest.mark.parametrize(
    ("rule", "asked", "right"),
    [
        (["column"], "['column']", "replicate"),
        (None, "None", "replicate"),
        (4, "4", "replicate"),
        ((4,), "(4,)", "replicate"),
        (np.array(["row", "column"]), "array(['row', 'column']", "replicate"),
        ("colum", '"colum"', "column"),
    ],
    ids=str,
)
def test_what_is_no_rule_is_refused_with_the_nearest_there_is(rule: object, asked: str, right: str) -> None:
    kit = TableKit({"0.weight": "column", "1.weight": rule, "*.bias": "replicate"})  # type: ignore[dict-item]
    module = kit.build(0, torch.float32)
    for tied in (False, True):
        module[1].weight = module[0].weight if tied else module[1].weight
        with pytest.raises(SpecError) as error:
            parameter_rules(kit, module)
        (problem,) = error.value.problems
        assert problem.asked.startswith(f"sharding rule {asked}")
        assert problem.asked.endswith(' for "1.weight"')
        assert problem.instead == f'{{"1.weight": "{right}"}} in the model\'s sharding()'


def test_a_pattern_that_is_no_text_is_refused() -> None:
    kit = TableKit({"*": "replicate", 0: Heads(2)})  # type: ignore[dict-item]
    with pytest.raises(SpecError) as error:
        parameter_rules(kit, kit.build(0, torch.float32))
    (problem,) = error.value.problems
    assert (problem.asked, problem.found) == ("sharding rule Heads(2) for 0", "a pattern of type int")
    assert problem.instead.startswith("a text in quotes")


PAIRS: dict[str, Rule] = {
    **{f"*.query.{key}": Heads(4) for key in ("weight", "bias")},
    **{f"*.{name}.{key}": Heads(2) for name in ("key", "value") for key in ("weight", "bias")},
    "*.output.weight": "row",
    "*.up.weight": "column",
    "*.up.bias": "column",
    "*.down.weight": "row",
    **{f"*.{name}": "replicate" for name in ("output.bias", "down.bias", "norm.weight", "norm.bias")},
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("lost", "right"),
    [
        (("query",), {"query.weight": Heads(4), "query.bias": Heads(4)}),
        (("key",), {"key.weight": Heads(2), "key.bias": Heads(2)}),
        (("value",), {"value.weight": Heads(2), "value.bias": Heads(2)}),
        (("query", "output"), {"query.weight": Heads(4), "output.weight": "row", "output.bias": "replicate"}),
        (("output",), {"output.weight": "row", "output.bias": "replicate"}),
        (("up",), {"up.weight": "column", "up.bias": "column"}),
        (("down",), {"down.weight": "row", "down.bias": "replicate"}),
        (("norm",), {"norm.weight": "replicate", "norm.bias": "replicate"}),
        (("query.bias",), {"query.bias": Heads(4)}),
        (
            ("query", "key", "value", "output", "up", "down"),
            {"query.weight": "replicate", "down.weight": "replicate"},
        ),
    ],
)
def test_a_missing_entry_is_answered_by_the_rules_beside_it(
    lost: tuple[str, ...], right: dict[str, Rule], apart: bool
) -> None:
    attention = {"norm": nn.LayerNorm(32), "query": nn.Linear(32, 32), "key": nn.Linear(32, 16)}
    attention |= {"value": nn.Linear(32, 16), "output": nn.Linear(32, 32)}
    ahead: dict[str, nn.Module] = {"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}
    parts = (
        {"attention": nn.ModuleDict(attention), "ahead": nn.ModuleDict(ahead)} if apart else attention | ahead
    )
    blocks = nn.Sequential(nn.ModuleDict(parts))
    table = {name: rule for name, rule in PAIRS.items() if not any(f".{part}" in name for part in lost)}
    with pytest.raises(SpecError) as error:
        parameter_rules(TableKit(table), blocks)
    told = " ".join(problem.instead for problem in error.value.problems)
    for name, rule in right.items():
        assert f'{name}": {word(rule)}}}' in told


def test_a_missing_entry_that_nothing_tells_of_is_replicated() -> None:
    own = nn.Module()
    own.weight, own.bias, own.scale = (nn.Parameter(torch.ones(size)) for size in ((2, 2), (2,), ()))
    own.places, own.up, own.empty = nn.Embedding(4, 2), nn.Linear(2, 4), nn.Linear(2, 3, bias=False)
    with pytest.raises(SpecError) as error:
        parameter_rules(TableKit({"up.*": Heads(2)}), own)
    assert [problem.instead.split("}")[0] for problem in error.value.problems] == [
        f'{{"{name}": "replicate"' for name in ("weight", "bias", "scale", "places.weight", "empty.weight")
    ]


def test_what_is_said_of_a_parameter_in_every_block_is_said_once() -> None:
    kit = TableKit({"*.weight": "column"})
    with pytest.raises(SpecError) as error:
        parameter_rules(kit, nn.Sequential(*(nn.Linear(2, 2) for _ in range(80))))
    (problem,) = error.value.problems
    assert problem.asked == 'the sharding rule of parameter "0.bias" and 79 more of "*.bias"'
    assert problem.instead == '{"*.bias": "column"} in the model\'s sharding()'


def test_tied_parameters_of_two_rules_in_every_block_are_told_once() -> None:
    blocks = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"}) for _ in range(3)
    )
    for block in blocks:
        block["b"].weight = block["a"].weight
    with pytest.raises(SpecError) as error:
        parameter_rules(TableKit({"*.a.*": "column", "*.b.*": "row"}), blocks)
    (problem,) = error.value.problems
    assert problem.asked.endswith('for 0.b.weight and 2 more of "*.b.weight"')
    assert problem.instead.endswith("or no rule for *.b.weight")


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_there_is() -> None:
    kit = TableKit({"*.weight": "column", "*.bias": "replicate", "0.wieght": "row", "elsewhere": "row"})
    with pytest.raises(SpecError) as error:
        parameter_rules(kit, kit.build(0, torch.float32))
    near, far = error.value.problems
    assert near.asked == 'sharding rule for "0.wieght"'
    assert near.found == "no parameter of the model matches it"
    assert near.instead.startswith('"*.weight", or leave it out')
    assert far.instead.startswith("leave it out")


def test_a_misspelt_pattern_is_answered_with_what_no_pattern_matches() -> None:
    network = nn.ModuleDict({"q": nn.Linear(2, 2, bias=False), "up": nn.Linear(2, 4, bias=False)})
    with pytest.raises(SpecError) as error:
        parameter_rules(TableKit({"q.*": "column", "uq.*": "column"}), network)
    *_, idle = error.value.problems
    assert idle.asked == 'sharding rule for "uq.*"'
    assert idle.instead.startswith('"up.*", or')


def test_a_module_in_place_of_its_parameters_is_answered_with_them() -> None:
    kit = TableKit({"0": Heads(2), "1.*": "replicate"})
    with pytest.raises(SpecError) as error:
        parameter_rules(kit, kit.build(0, torch.float32))
    assert [problem.asked for problem in error.value.problems] == [
        'the sharding rule of parameter "0.weight"',
        'the sharding rule of parameter "0.bias"',
        'sharding rule for "0"',
    ]


def test_a_misspelt_pattern_gives_its_rule_to_what_it_was_meant_for() -> None:
    kit = TableKit({"*.wieght": Heads(2), "*.bias": "replicate"})
    with pytest.raises(SpecError) as error:
        parameter_rules(kit, kit.build(0, torch.float32))
    assert error.value.problems[0].instead == '{"*.weight": Heads(2)} in the model\'s sharding()'


def test_a_tied_parameter_has_the_rule_of_its_first_name_and_no_other() -> None:
    kit = TableKit({"0.weight": "column", "*.bias": "replicate"})
    module = kit.build(0, torch.float32)
    module[1].weight = module[0].weight
    assert parameter_rules(kit, module) == {
        "0.weight": "column",
        "0.bias": "replicate",
        "1.bias": "replicate",
    }
    kit.table["1.weight"] = "column"
    assert "1.weight" not in parameter_rules(kit, module)
    kit.table["1.weight"] = "row"
    with pytest.raises(SpecError, match="tied"):
        parameter_rules(kit, module)


def test_a_loss_is_at_least_fp32() -> None:
    assert wide(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert wide(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    logits = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    total, count = cross_entropy(
        logits, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    )
    assert (total.dtype, count.item()) == (torch.float32, 6)
    total, count = squared_error(logits[0], torch.ones(3, 4), torch.tensor([True, False, True]))
    assert (total.item(), total.dtype, count.item()) == (2.0, torch.float32, 2)
