"""What a sharding table must be before anything is cut by it; no ranks are needed."""

from __future__ import annotations

import pytest
from torch import nn

from fourfold.models.protocol import Heads, Rule
from fourfold.parallel.table import check_table
from fourfold.spec.errors import SpecError


@pytest.mark.parametrize(
    ("weight", "bias", "asked", "instead"),
    [
        (Heads(3), Heads(3), "layout.tp = 4 with 0.{key} of shape {shape}", "Heads(2)"),
        ("column", "replicate", 'sharding rules "column" for 0.weight and "replicate" for 0.bias', "column"),
        ("row", "row", 'sharding rule "row" for 0.bias', "replicate"),
    ],
    ids=str,
)
def test_what_is_said_of_a_parameter_in_every_block_is_said_once(
    weight: Rule, bias: Rule, asked: str, instead: str
) -> None:
    blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(80)))
    rules = {name: weight if name.endswith("weight") else bias for name, _ in blocks.named_parameters()}
    with pytest.raises(SpecError) as error:
        check_table(blocks, rules, 4)
    problems = error.value.problems
    keys = {"weight": (8, 8), "bias": (8,)} if weight == Heads(3) else {"bias": (8,)}
    assert [problem.asked for problem in problems] == [
        f'{asked.format(key=key, shape=shape)} and 79 more of "*.{key}"' for key, shape in keys.items()
    ]
    assert all(instead in problem.instead for problem in problems)


def test_what_differs_from_block_to_block_is_told_of_each() -> None:
    blocks = nn.Sequential(
        nn.Linear(8, 6, bias=False), nn.Linear(8, 10, bias=False), nn.Linear(8, 6, bias=False)
    )
    with pytest.raises(SpecError) as error:
        check_table(blocks, dict.fromkeys(dict(blocks.named_parameters()), "column"), 4)
    assert [problem.asked for problem in error.value.problems] == [
        'layout.tp = 4 with 0.weight of shape (6, 8) and 1 more of "*.weight"',
        "layout.tp = 4 with 1.weight of shape (10, 8)",
    ]
