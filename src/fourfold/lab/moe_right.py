"""What is right for a rank of the experts' exercise, by what one device has: at each place another part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fourfold.lab.moe_steps import EP, TOP_K, TRAVELS, Step, travellers
from fourfold.verify.measure import largest, relative_gap, worst

if TYPE_CHECKING:
    from torch import Tensor

Values = Mapping[str, "Tensor"]


class Pair(NamedTuple):
    """What a rank has, or ranks have in sum, beside one device's. rank: the first of them."""

    rank: int
    found: Tensor
    right: Tensor


def pairs(step: Step, found: Sequence[Values], right: Values) -> list[Pair]:
    """Of a step, of every rank; of shares, of those ranks that have them of the same."""
    whole, world = right[step.of], len(found)
    per_row = world // len(right["counts of rows"])
    experts = whole.chunk(EP)

    def summed(ranks: range, beside: Tensor) -> Pair:
        return Pair(
            ranks[0], sum((found[rank][step.name] for rank in ranks[1:]), found[ranks[0]][step.name]), beside
        )

    if step.place == "partial":
        return [summed(range(world), whole)]
    if step.place == "shares of experts":
        return [summed(range(ep, world, EP), experts[ep]) for ep in range(EP)]
    if step.place == "shares of a row":
        return [
            summed(range(row * per_row, (row + 1) * per_row), whole[row : row + 1])
            for row in range(len(whole))
        ]
    if step.place == "experts":
        parts = [experts[rank % EP] for rank in range(world)]
    elif step.place == "tokens":
        parts = list(whole.chunk(world))
    elif step.place == "row":
        parts = [whole[rank // per_row : rank // per_row + 1] for rank in range(world)]
    elif step.place == "matrix":
        parts = [whole[rank // EP * EP :][:EP].chunk(EP, 1)[rank % EP] for rank in range(world)]
    elif step.place in TRAVELS:
        parts = [whole[choices_at(step, rank, world, right)] for rank in range(world)]
    else:
        parts = [whole] * world
    return [
        Pair(rank, have[step.name], part) for rank, (have, part) in enumerate(zip(found, parts, strict=True))
    ]


def choices_at(step: Step, rank: int, world: int, right: Values) -> list[int]:
    """Which choices a rank has at a step of TRAVELS."""
    return travellers(step.place, rank, world, experts_of(right), len(right["R"]))


def experts_of(right: Values) -> list[int]:
    """The expert of every choice; their number where the choice was dropped."""
    return right["chosen"].masked_fill(~right["kept"], len(right["R"])).flatten().tolist()


def gap(step: Step, found: Sequence[Values], right: Values) -> float:
    """How far the ranks' value of a step is from one device's, relative; inf where the shape is another."""
    gradient = step.of.startswith("∂")
    kind = largest(value.numpy() for name, value in right.items() if name.startswith("∂") == gradient)
    return worst(
        relative_gap(pair.found.numpy(), pair.right.numpy(), kind) for pair in pairs(step, found, right)
    )


def furthest(step: Step, found: Sequence[Values], right: Values) -> tuple[Pair, list[int]]:
    """The pair that is furthest apart, and the index at which it is."""
    pair = max(pairs(step, found, right), key=lambda one: float((one.found - one.right).abs().max()))
    flat = int((pair.found - pair.right).abs().argmax())
    index: list[int] = []
    for size in reversed(pair.right.shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return pair, index


def labels(step: Step, rank: int, world: int, right: Values) -> list[str]:
    """What each line of a rank's value is of: a token, a choice, the rank that sent it; [] where they need no name."""
    each = len(right["x"]) // world
    if step.place == "tokens":
        return [f"t{token}" for token in range(rank * each, (rank + 1) * each)]
    if step.place == "matrix":
        return [f"rank {rank // EP * EP + one}" for one in range(EP)]
    if step.place in TRAVELS:
        choices = choices_at(step, rank, world, right)
        names = named(choices, right)
        if step.place == "sent":
            return names
        return [f"{name} r{choice // (each * TOP_K)}" for name, choice in zip(names, choices, strict=True)]
    return []


def named(choices: Sequence[int], right: Values) -> list[str]:
    """Choices in words: t3 e0 is token 3 with expert 0."""
    expert = right["chosen"].flatten().tolist()
    return [f"t{choice // TOP_K} e{expert[choice]}" for choice in choices]
