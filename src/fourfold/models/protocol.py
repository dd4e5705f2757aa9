"""What a model is to the rest of Fourfold: built from a seed, a loss as (sum, count), a sharding table, blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.collectives.context import Context
from fourfold.spec.errors import Problem, SpecError


class Heads(NamedTuple):
    """A Linear's weight and bias over its outputs, in `units` equal parts that are never cut (attention heads).

    Each tensor-parallel rank gets whole units, as a plain tensor; where there are more ranks than units, several ranks
    hold the same unit. What is computed from them must end in a "row" Linear, and hold no dropout.
    """

    units: int


Rule = (
    Literal[
        "column", "row", "vocabulary", "replicate", "within heads", "expert column", "expert row", "expert"
    ]
    | Heads
)
"""How tensor parallel cuts a parameter.

column      a Linear's weight or bias over its outputs (dim 0); they stay one tensor (a DTensor) to what follows
Heads(n)    the same in n whole units, which come out as this rank's own plain tensor
row         a Linear's weight over its inputs (dim 1); its outputs are summed
vocabulary  an embedding or output head over the vocabulary (dim 0)
replicate   whole on every rank
within heads  whole on every rank, of what stands between Heads and row (a norm of each head): it takes this rank's own
            plain tensor, and its gradient is the sum over ranks

Of experts, in stacks [experts, ...] that `models.exchange` hands over: expert parallel gives each rank whole experts
(dim 0); without it tensor parallel cuts each of them

expert column  over its hidden features, the outputs of its weight [experts, outputs, inputs] (dim 1)
expert row     over its hidden features, the inputs of its weight (dim 2)
expert         not at all: a bias of an expert row
"""

_WORDS = get_args(get_args(Rule)[0])


class Start(NamedTuple):
    """Where a parameter's values start: normal around `mean`, or just `mean` where `std` is 0."""

    mean: float
    std: float


class BatchLike(Protocol):
    """What a loss may read of a microbatch (`fourfold.data.batch.Batch` is one): B rows, T tokens, F features."""

    @property
    def inputs(self) -> Tensor:
        """int64 [B, T] tokens, or float [B, F] features."""

    @property
    def targets(self) -> Tensor:
        """int64 [B, T] tokens, float [B, F], or int64 [B] classes."""

    @property
    def valid(self) -> Tensor:
        """bool [B, T] or [B]: which targets carry loss."""

    @property
    def documents(self) -> Tensor | None:
        """int32 [B, T]: number of the document inside its row; None for vectors."""

    @property
    def context(self) -> Context | None:
        """Under context parallel: where the tokens stand of which inputs, targets and valid are; None: all are here.

        `documents` are always those of whole rows.
        """

    @property
    def rows(self) -> Tensor:
        """int64 [B]: each row's place in the global batch."""

    @property
    def seed(self) -> int:
        """Of the run."""

    @property
    def step(self) -> int:
        """Optimizer step, counted from 0."""


class ModelKit(Protocol):
    """A model and what the trainer needs to know about it; it knows no ranks."""

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        """The network on the CPU with parameters in `dtype`: a function of the seed alone."""

    def loss(self, module: nn.Module, batch: BatchLike) -> tuple[Tensor, Tensor]:
        """(sum over valid targets, in fp32 or wider; count of valid targets), two scalars on the batch's device."""

    def sharding(self) -> dict[str, Rule]:
        """Pattern of parameter names -> rule; `*` stands for anything.

        Each parameter matches exactly one pattern, and each pattern a parameter.
        """

    def blocks(self, module: nn.Module) -> tuple[str, ...]:
        """Names of the repeated submodules in order of execution: the units of sharding and recomputation."""


@runtime_checkable
class BoxedKit(ModelKit, Protocol):
    """A kit whose network can be made in parts: without values first, then each rank fills what it holds."""

    def skeleton(self, dtype: torch.dtype) -> nn.Module:
        """The network of `build` on the meta device; ties are made, and no buffer needs a value."""

    def start(self, name: str) -> Start:
        """Where the values of parameter `name` start in `build`: `fill` and `normal` (seed, name) give the rest."""


@runtime_checkable
class StagedKit(ModelKit, Protocol):
    """A kit whose network can run in parts: a stage of a pipeline has some of its blocks, and None for what it lacks.

    What goes from block to block is one tensor, of the same shape and dtype between any two: the stream.
    """

    def ends(self, module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the modules that run before the first block, and of those that run after the last one."""

    def stream(self, batch: BatchLike) -> tuple[int, ...]:
        """The shape of the stream of a microbatch."""

    def part(
        self, module: nn.Module, batch: BatchLike, stream: Tensor | None, last: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What `loss` does, by the blocks that are here.

        stream: what the blocks before these gave; None: these are the first. last: these are the last: gives the pair
        of `loss`, else the stream that the next blocks take.
        """


class LossModule(nn.Module):
    """A network and its loss as one module, so that a wrapper (DDP) sees the whole forward."""

    def __init__(self, kit: ModelKit, module: nn.Module) -> None:
        super().__init__()
        self.kit = kit
        self.module = module

    def forward(self, batch: BatchLike) -> tuple[Tensor, Tensor]:
        """(sum, count) of the microbatch; see `ModelKit.loss`."""
        return _plain(*self.kit.loss(self.module, batch))


class StageModule(LossModule):
    """Some blocks of a network, with what runs before or after them where they are the first or the last."""

    def __init__(self, kit: StagedKit, module: nn.Module, last: bool) -> None:
        super().__init__(kit, module)
        self.last = last

    def forward(self, batch: BatchLike, stream: Tensor | None = None) -> Any:
        """See `StagedKit.part`."""
        assert isinstance(self.kit, StagedKit), "it was made with one"
        given = self.kit.part(self.module, batch, stream, self.last)
        return given if isinstance(given, Tensor) else _plain(*given)


def _plain(total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    # A copy: of a view, which full_tensor gives, FSDP2 warns that it must not be changed in place.
    return (total.full_tensor().clone() if isinstance(total, DTensor) else total), count


def parameter_rules(kit: ModelKit, module: nn.Module) -> dict[str, Rule]:
    """The rule of each parameter of `module`, the whole network, by its name; a tied one by its first.

    Raises SpecError naming every parameter that matches no pattern or several, and every tied one of two rules, the
    first of those that are one in every block; every pattern that matches none or is no text; every rule that is none.
    """
    asked = kit.sharding()
    named = list(module.named_parameters(remove_duplicate=False))
    all_patterns = [pattern for pattern in asked if isinstance(pattern, str)]
    table = {pattern: asked[pattern] for pattern in all_patterns if _is_rule(asked[pattern])}
    problems = [_no_pattern(pattern, asked[pattern]) for pattern in asked if not isinstance(pattern, str)]
    problems += [_no_rule(pattern, asked[pattern]) for pattern in all_patterns if pattern not in table]
    matching = {name: [p for p in all_patterns if fnmatchcase(name, p)] for name, _ in named}
    used = {pattern for patterns in matching.values() for pattern in patterns}
    idle = [pattern for pattern in all_patterns if pattern not in used]
    first: dict[int, str] = {}
    rules: dict[str, Rule] = {}
    lost: list[tuple[str, list[str]]] = []
    torn: list[tuple[str, Problem]] = []
    for name, parameter in named:
        patterns = matching[name]
        known = first.setdefault(id(parameter), name)
        if known != name and not patterns:
            continue  # the rule of its first name is enough
        if len(patterns) != 1:
            lost.append((name, patterns))
        elif patterns[0] not in table:
            continue  # told already
        elif known == name:
            rules[name] = table[patterns[0]]
        elif known in rules and table[patterns[0]] != rules[known]:
            torn.append((name, _torn(known, rules[known], name, table[patterns[0]])))
    meant = {pattern: table[pattern] for pattern in idle if pattern in table}
    found = [(n, _unmatched(n, patterns, meant, _likely(n, module, rules))) for n, patterns in lost]
    problems += by_pattern(found + torn)
    unmet = [name for name, patterns in lost if not patterns]
    problems += [_idle(pattern, unmet or list(matching)) for pattern in idle]
    if problems:
        raise SpecError(problems)
    return rules


def pattern_of(name: str) -> str:
    """The pattern of a parameter or module in every block: numbers stand for any."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def by_pattern(faults: Sequence[tuple[str, Problem]]) -> list[Problem]:
    """The problems of parameters, by name: one for all of one pattern that say the same, naming the first of them."""
    same: dict[tuple[str, ...], list[Problem]] = {}
    for name, problem in faults:
        said = (pattern_of(name), problem.found, problem.why, problem.instead)
        same.setdefault(said, []).append(problem)
    return [
        replace(first, asked=f'{first.asked} and {len(more)} more of "{pattern}"') if more else first
        for (pattern, *_), (first, *more) in same.items()
    ]


def _is_rule(rule: object) -> bool:
    if isinstance(rule, Heads):
        units: object = rule.units
        return isinstance(units, int) and not isinstance(units, bool) and units > 0
    return isinstance(rule, str) and rule in _WORDS


def _no_rule(pattern: str, rule: object) -> Problem:
    asked = f'sharding rule {word(rule)} for "{pattern}"'
    if isinstance(rule, Heads):
        return Problem(
            asked=asked,
            found=f"{word(rule.units)} as its number of units",
            why="it is a whole number, at least 1",
            instead="Heads(the number of heads)",
        )
    near = get_close_matches(rule, _WORDS, n=1) if isinstance(rule, str) else []
    return Problem(
        asked=asked,
        found=f"the rules are {', '.join(_WORDS)} and Heads(units)",
        why="tensor parallel would not know how to cut the parameter",
        instead=typed({pattern: near[0] if near else "replicate"}),
    )


def _no_pattern(pattern: object, rule: object) -> Problem:
    return Problem(
        asked=f"sharding rule {word(rule)} for {pattern!r}",
        found=f"a pattern of type {type(pattern).__name__}",
        why="parameters are matched by their names, which are text",
        instead='a text in quotes, such as "blocks.*.query.*"',
    )


def _unmatched(name: str, matching: list[str], idle: Mapping[str, Rule], likely: Rule) -> Problem:
    if matching:
        found = "patterns " + " and ".join(f'"{pattern}"' for pattern in matching) + " match it"
        instead = "patterns of which exactly one matches"
    else:
        found = "no pattern matches it"
        meant = get_close_matches(pattern_of(name), idle, n=1)
        instead = typed({pattern_of(name): idle[meant[0]] if meant else likely})
    return Problem(
        asked=f'the sharding rule of parameter "{name}"',
        found=found,
        why="each parameter needs exactly one rule",
        instead=instead,
    )


def _likely(name: str, network: nn.Module, rules: Mapping[str, Rule]) -> Rule:
    """The rule for a parameter without one, by those of the Linears beside its own; "replicate" where none tells."""
    owner, _, key = name.rpartition(".")
    if key == "bias":
        weight = f"{owner}.weight"
        rule = rules.get(weight) or _likely(weight, network, rules)
        return "replicate" if rule == "row" else rule
    linears = _linears(network, owner.rpartition(".")[0])
    if name not in linears:
        return "replicate"
    names, (outputs, inputs) = list(linears), linears[name]
    at = names.index(name)
    rows = [place for place, other in enumerate(names) if rules.get(other) == "row"]
    begin = max((place + 1 for place in rows if place < at), default=0)
    end = min((place for place in rows if place > at), default=len(names))
    summed = linears[names[end]][1] if end < len(names) else 0  # the inputs of the row that ends this pair
    before, after = names[begin:at], names[at + 1 : end]
    whole = ("replicate", "vocabulary")
    cut = {other: rule for other in before + after if (rule := rules.get(other, "replicate")) not in whole}
    fed = any(linears[other][0] == inputs for other in before if other in cut or other not in rules)
    later = any(linears[other][1] == inputs for other in after if other not in rules)
    if cut and fed and not later and summed != inputs:
        return "row"
    widths = [linears[other][0] // rule.units for other, rule in cut.items() if isinstance(rule, Heads)]
    units = [outputs // width for width in widths if width and outputs % width == 0]
    if units:
        return Heads(units[0])
    alone = names[begin:end] == [name] and outputs == summed
    return "column" if alone or "column" in cut.values() else "replicate"


def _linears(network: nn.Module, parent: str) -> dict[str, tuple[int, ...]]:
    """The weights [outputs, inputs] of the modules right in `parent`, by name, in order."""
    return {
        f"{parent}.{child}.weight".removeprefix("."): tuple(weight.shape)
        for child, module in network.get_submodule(parent).named_children()
        if (weight := module._parameters.get("weight")) is not None
        and weight.ndim == 2
        and not isinstance(module, nn.Embedding)
    }


def _idle(pattern: str, names: list[str]) -> Problem:
    known = {pattern_of(name) for name in names}
    known |= {f"{parent}.*" for name in known if (parent := name.rpartition(".")[0])}
    near = get_close_matches(pattern, sorted(known), n=1)
    return Problem(
        asked=f'sharding rule for "{pattern}"',
        found="no parameter of the model matches it",
        why="it would be silently ignored, and what it was meant for be cut otherwise or not at all",
        instead=(f'"{near[0]}", or ' if near else "")
        + "leave it out of the table where the model has no such part",
    )


def _torn(one: str, its: Rule, other: str, others: Rule) -> Problem:
    return Problem(
        asked=f"sharding rules {word(its)} for {one} and {word(others)} for {other}",
        found="one parameter of two names (tied)",
        why="it is cut once, by the rule of its first name: the other would be silently ignored",
        instead=f"{typed({pattern_of(other): its})}, or no rule for {pattern_of(other)}",
    )


def word(rule: object) -> str:
    """A rule, or what stands in the place of one, as it is typed."""
    if isinstance(rule, Heads):
        return f"Heads({word(rule.units)})"
    return f'"{rule}"' if isinstance(rule, str) else repr(rule)


def typed(table: Mapping[str, object]) -> str:
    """Lines of a sharding table as they are typed."""
    lines = ", ".join(f'"{pattern}": {word(rule)}' for pattern, rule in table.items())
    return f"{{{lines}}} in the model's sharding()"
