"""The sharding table of a transformers model, from its own tensor parallel plan.

A plan names modules below the base model, and how each is cut; `rules_huggingface.STYLES` says what that is here. What
it does not name is whole on every rank. One thing more is known here than there: of a "colwise" Linear that makes
heads, a rank gets whole ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fourfold.models.protocol import Heads, Rule
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.rules_huggingface import STYLES


def table_of(network: Any) -> dict[str, Rule]:
    """The rule of each parameter of `network`, by its name; a tied one by its first.

    network: a transformers model. Raises SpecError for a style that is no rule here, by name.
    """
    plan: Mapping[str, str] = network.tp_plan or {}
    head = network.get_output_embeddings()
    table: dict[str, Rule] = {}
    for owner, module in network.named_modules():
        style = _style(owner, plan)
        for key, _ in module.named_parameters(recurse=False):
            name = f"{owner}.{key}".removeprefix(".")
            own = _style(name, plan) or style
            if own is None:
                table[name] = "replicate"
                continue
            if own not in STYLES:
                raise SpecError(_no_rule(network, name, own))
            table[name] = _rule(network, owner, module, key, STYLES[own], head)
    names = {name for name, _ in network.named_parameters()}
    return {name: rule for name, rule in table.items() if name in names}


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def _rule(network: Any, owner: str, module: nn.Module, key: str, word: str, head: nn.Module | None) -> Rule:
    if word == "vocabulary" and not (module is head or isinstance(module, nn.Embedding)):
        raise SpecError(_no_rule(network, f"{owner}.{key}", "an output that is gathered"))
    if word == "Heads":
        outputs = next(iter(module.parameters(recurse=False))).shape[0]
        width = getattr(network.get_submodule(owner.rpartition(".")[0]), "head_dim", None)
        return Heads(outputs // width if width and outputs % width == 0 else outputs)
    if word == "row":
        return "row" if key == "weight" else "replicate"
    if word == "vocabulary":
        return "vocabulary"
    return "within heads" if word == "within heads" else "replicate"


def _no_rule(network: Any, name: str, style: str) -> Problem:
    return Problem(
        asked=f"layout.tp with {type(network).__name__}",
        found=f'"{style}" in its plan for "{name}"',
        why="it is no rule of a sharding table: the styles that are, " + ", ".join(STYLES),
        instead="--set layout.tp=1",
    )
