"""What a sharding table must be for tensor parallel, before anything is cut by it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fourfold.models.protocol import Heads, Rule, by_pattern, pattern_of, typed, word
from fourfold.spec.boxes import shard_range
from fourfold.spec.degrees import nearest_divisors
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.rules_model import either

CUT_DIMS: Mapping[str, int | None] = {
    "column": 0,
    "row": 1,
    "vocabulary": 0,
    "replicate": None,
    "within heads": None,
    "expert column": 1,
    "expert row": 2,
    "expert": None,
}
"""The dim that tensor parallel cuts by each rule but Heads; of experts, where it cuts these."""


def check_table(network: nn.Module, rules: dict[str, Rule], ranks: int) -> None:
    """Raises SpecError for all rules by which `network` cannot be cut over `ranks`. Collectives: none."""
    problems: list[Problem] = []
    if all(rule == "replicate" for rule in rules.values()):
        problems.append(
            Problem(
                asked=f"layout.tp = {ranks}",
                found="a model whose sharding table cuts nothing",
                why="tensor parallel would compute everything on every rank",
                instead="a sharding() that says which Linear is column and which row (docs/own_model.md), or "
                "--set layout.tp=1",
            )
        )
    faults = [(name, _bias(name, rules)) for name in rules if _bias_differs(name, rules)]
    parameters = dict(network.named_parameters())
    for name, rule in rules.items():
        shape = parameters[name].shape
        if rule == "row" and len(shape) < 2:
            faults.append((name, _no_row(name, shape)))
            continue
        dim = 0 if isinstance(rule, Heads) else CUT_DIMS[rule]
        if dim is not None and dim >= len(shape):
            faults.append((name, _no_stack(name, shape, rule)))
            continue
        length = 1 if dim is None else shape[dim]
        units = rule.units if isinstance(rule, Heads) else length
        divides = units % ranks == 0 or (isinstance(rule, Heads) and ranks % units == 0)
        if rule == "vocabulary" and not shard_range(length, ranks, ranks - 1)[1]:
            faults.append((name, _no_rows(name, length, ranks)))
        if rule in ("replicate", "within heads", "vocabulary", "expert") or (divides and length % units == 0):
            continue
        faults.append((name, _no_parts(name, shape, units, length, ranks)))
    problems += by_pattern(faults)
    if problems:
        raise SpecError(problems)


def _bias_differs(name: str, rules: dict[str, Rule]) -> bool:
    """Whether it is a bias that is not cut as the outputs of its weight are; as row it is another fault."""
    owner, _, key = name.rpartition(".")
    weight = rules.get(f"{owner}.weight")
    if key != "bias" or weight is None or rules[name] == "row":
        return False
    return rules[name] != ("replicate" if weight == "row" else weight)


def _bias(name: str, rules: dict[str, Rule]) -> Problem:
    owner = name.rpartition(".")[0]
    weight = rules[f"{owner}.weight"]
    return Problem(
        asked=f"sharding rules {word(weight)} for {owner}.weight and {word(rules[name])} for {name}",
        found="outputs that are cut otherwise than the bias that is added to them",
        why="the bias of a row is added once, to the summed outputs; any other is cut as its weight is",
        instead=typed({pattern_of(name): "replicate" if weight == "row" else weight}),
    )


def _no_row(name: str, shape: torch.Size) -> Problem:
    return Problem(
        asked=f'sharding rule "row" for {name}',
        found=f"a tensor of shape {tuple(shape)}",
        why="a row is cut over the inputs, dim 1: what has none is added once, whole, to the summed outputs",
        instead=typed({pattern_of(name): "replicate"}),
    )


def _no_stack(name: str, shape: torch.Size, rule: Rule) -> Problem:
    return Problem(
        asked=f"sharding rule {word(rule)} for {name}",
        found=f"a tensor of shape {tuple(shape)}",
        why="experts are cut in stacks: [experts, outputs, inputs], and biases of a column [experts, outputs]",
        instead=typed({pattern_of(name): "replicate"}),
    )


def _no_parts(name: str, shape: torch.Size, units: int, length: int, ranks: int) -> Problem:
    whole = length % units == 0
    return Problem(
        asked=f"layout.tp = {ranks} with {name} of shape {tuple(shape)}",
        found=f"{units} parts for {ranks} ranks"
        if whole
        else f"{length} outputs, which make no {units} equal parts",
        why="tensor parallel gives every rank equally many whole parts of a dim",
        instead=f"{either('layout.tp', nearest_divisors(units, ranks))} or another rule for it in the "
        "model's sharding()"
        if whole
        else " or ".join(f"Heads({n})" for n in nearest_divisors(length, units)),
    )


def _no_rows(name: str, rows: int, ranks: int) -> Problem:
    """Rows need not divide, but torch's loss over a vocabulary that is cut takes no empty part of it."""
    least = next(n for n in range(rows, rows + ranks * ranks) if shard_range(n, ranks, ranks - 1)[1])
    return Problem(
        asked=f"layout.tp = {ranks} with {name} of {rows} rows",
        found=f"parts of {-(-rows // ranks)} rows, of which the last rank gets none",
        why="the loss over a vocabulary that is cut needs a part of it on every rank",
        instead=f"a vocabulary of {least} (the rest is never a target), or a smaller layout.tp",
    )
