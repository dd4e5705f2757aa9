"""How `fourfold lab moe` prints its document: every value of every rank with the tokens it is of, tables, mistakes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fourfold.cli.lab_tensor import beside, ending
from fourfold.cli.output import paint, table, wrapped
from fourfold.lab.moe_steps import PLACES

NEXT = (
    "fourfold verify equal moe-tiny --world 2 --set layout.dp_shard=2 --set layout.zero=2 --set layout.ep=2"
)
_SHARES = ("partial", "shares of experts", "shares of a row")
_NOUGHT = 1e-12


def moe_lines(document: Mapping[str, Any]) -> list[str]:
    """The way of tokens and of gradients, step by step; what a capacity drops; the load of experts; each mistake."""
    sizes, ranks, ep = document["sizes"], document["ranks"], document["ep"]
    copies = "" if ranks == ep else f", {ranks // ep} ranks have each"
    lines = [
        *wrapped(
            f"{sizes['rows']} rows of {sizes['tokens']} tokens on {ranks} ranks, {sizes['experts']} experts, "
            f"2 for a token; {sizes['experts'] // ep} on a rank{copies}",
            0,
        ),
        *wrapped(
            "t3 e0 r1: token 3 with its expert 0, from rank 1; ∂x: the gradient by x; fp64. Put together, what "
            "ranks have is what one device has; where they have shares of a sum, that stands beside.",
            0,
        ),
    ]
    for part in document["parts"]:
        lines += ["", paint(part["title"], "bold", sys.stdout)]
        lines += [line for step in part["steps"] for line in _step(step, sizes["experts"] // ep)]
    lines += [
        "",
        *_capacity(document["capacity"]),
        "",
        *_load(document["capacity"]),
        "",
        *_balance(document["balance"]),
    ]
    return [*lines, *ending(document)]


def _step(step: Mapping[str, Any], experts_here: int) -> Iterator[str]:
    made = f"{step['collective']}: " if step["collective"] else ""
    off = "" if step["gap"] < _NOUGHT else f"; {step['gap']:.1e} off"
    yield from wrapped(f"{step['name']} = {made}{step['text']}   ({PLACES[step['place']]}{off})")
    if step["why"]:
        yield from wrapped(f"({step['why']})", 2)
    yield from beside(list(_blocks(step, experts_here)))


def _blocks(step: Mapping[str, Any], experts_here: int) -> Iterator[tuple[str, list[str]]]:
    """What each rank has; where these are shares of a sum, what one device has, too."""
    values, unit = step["ranks"], math.log(2) if step["in_ln2"] else 1.0
    if step["place"] == "whole" and all(value == values[0] for value in values):
        yield "every rank", _drawn(values[0], [], unit)
        return
    for rank, value in enumerate(values):
        if step["place"] in ("experts", "shares of experts"):
            first = rank * experts_here % len(step["one_device"])
            for expert, matrix in enumerate(value):
                yield f"rank {rank}, e{first + expert}", _drawn(matrix, [], unit)
        else:
            yield f"rank {rank}", _drawn(value, step["labels"][rank], unit)
    if step["place"] == "shares of experts":
        for expert, matrix in enumerate(step["one_device"]):
            yield f"one device, e{expert}", _drawn(matrix, [], unit)
    elif step["place"] in _SHARES:
        title = "sum: one device" if step["place"] == "partial" else "one device, by row"
        yield title, _drawn(step["one_device"], [], unit)


def _drawn(value: list[Any], labels: Sequence[str], unit: float) -> list[str]:
    """A matrix line by line, with what each line is of; a vector as one line."""
    rows = value if value and isinstance(value[0], list) else [value]
    cells = [[_number(number / unit) for number in row] for row in rows]
    wide = max((len(cell) for row in cells for cell in row), default=0) + 1
    names = labels or [""] * len(rows)
    left = max(map(len, names), default=0)
    return [f"{f' {name}':<{left + 1}}" * bool(left) + "".join(f"{cell:>{wide}}" for cell in row)
            for name, row in zip(names, cells, strict=True)]  # fmt: skip


def _number(number: float) -> str:
    return "0" if abs(number) < _NOUGHT else f"{number:.4g}"


def _capacity(capacity: Mapping[str, Any]) -> Iterator[str]:
    yield paint("with a capacity: what an expert has no room for is dropped", "bold", sys.stdout)
    yield from wrapped(
        f"factor {capacity['factor']:g}: of so many tokens an expert takes an equal share of their choices; first "
        "choices before second ones, then in the order of tokens. What is dropped adds nothing to y."
    )
    rows = [
        [one["over"], f"{one['tokens']}", f"{one['limit']}", ", ".join(one["dropped"]) or "none"]
        for one in capacity["dropped"]
    ]
    yield from table(["limit over", "tokens", "an expert takes", "dropped"], rows).splitlines()
    yield from wrapped(
        "Over all rows, or over what a rank happens to have, another layout would drop other tokens. Here a row is it."
    )
    y = capacity["y"]
    limited = [row for rank in y["limited"] for row in rank]
    names = [f"t{token}" for token in range(len(limited))]
    yield from beside(
        [("y without a limit", _drawn(y["free"], names, 1.0)), ("y with it", _drawn(limited, names, 1.0))]
    )


def _load(capacity: Mapping[str, Any]) -> Iterator[str]:
    yield paint("who waits: what each rank's experts receive, one way", "bold", sys.stdout)
    rows = []
    for name, load in (
        ("dropless", capacity["load"]["free"]),
        ("with the capacity", capacity["load"]["limited"]),
    ):
        most = max(one["choices"] for one in load)
        for rank, one in enumerate(load):
            idle = 1 - one["choices"] / most if most else 0.0
            waits = (
                f"waits {idle:.0%} of the time that the busiest computes"
                if idle
                else "the others wait for it"
            )
            rows.append([name if rank == 0 else "", f"{rank}", f"{one['choices']}", f"{one['bytes']}", waits])
    yield from table(["", "rank", "choices", "bytes from others", "computing"], rows).splitlines()
    yield from wrapped("The way back has the same bytes the other way, and backward both again.")


def _balance(ways: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Shares of the load over steps, without balance and with each kind."""
    titles = {"none": "no balance", "loss": "auxiliary loss", "bias": "corrections"}
    steps = len(ways[0]["loads"])
    yield paint(f"the load of experts in a training of {steps} steps, in %", "bold", sys.stdout)
    yield from wrapped(
        "Tokens lean to one side, so the router prefers some experts. The auxiliary loss pushes against it; "
        "corrections are added to the scores when experts are chosen, and moved after each step, down where an expert "
        "had more than the mean."
    )
    rows = []
    for step in [0, *range(4, steps, 5)]:
        cells = []
        for way in ways:
            load = way["loads"][step]
            shares = " ".join(f"{100 * one / sum(load):>2.0f}" for one in load)
            cells.append(f"{shares}  {way['losses'][step]:.2f}")
        rows.append([f"{step + 1}", *cells])
    experts = " ".join(f"e{expert}" for expert in range(len(ways[0]["loads"][0])))
    heads = ["step", *(f"{titles[way['name']]}" for way in ways)]
    yield from table(heads, [["", *[f"{experts}  loss"] * len(ways)], *rows]).splitlines()
    ends = ", ".join(f"{titles[way['name']]} {way['at_the_end']:.2f}" for way in ways)
    yield from wrapped(f"the busiest expert over the mean, of the last steps: {ends}")
