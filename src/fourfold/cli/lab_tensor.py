"""How `fourfold lab tensor` prints its document: every value of every rank, side by side, with its shape."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fourfold.cli.output import WIDTH, paint, wrapped
from fourfold.lab.tensor_steps import PLACES

Block = tuple[str, list[list[float]]]  # its title, its rows


def tensor_lines(document: Mapping[str, Any]) -> list[str]:
    """Both ways step by step, forward and backward; then each mistake, what it spoils and what it leaves."""
    sizes = document["sizes"]
    lines = [
        f"a layer of {sizes['tokens']} tokens, width {sizes['width']}, hidden {sizes['hidden']} on "
        f"{document['ranks']} ranks; ∂x: the gradient by x",
        *wrapped("whole numbers in fp64, so that sums can be followed by hand and are exact", 0),
    ]
    for part in document["parts"]:
        lines += ["", paint(part["title"], "bold", sys.stdout)]
        for way in ("forward", "backward"):
            lines += ["", paint(f" {way}", "bold", sys.stdout)]
            lines += [line for step in part[way] for line in _step(step)]
    return [*lines, *ending(document)]


def ending(document: Mapping[str, Any]) -> Iterator[str]:
    """The mistakes, what was compared with one device, the verdict: how the drawn exercises end."""
    for mistake in document["mistakes"]:
        yield from ("", *mistake_lines(mistake))
    yield from ("", paint("against one device, in fp64", "bold", sys.stdout))
    told = {mistake["name"] for mistake in document["mistakes"]}
    for finding in document["findings"]:
        if finding["verdict"] == "fail":
            yield from wrapped(f"failed: {finding['claim']}: {finding['measured']}")
        elif finding["claim"].partition(":")[0] not in told:
            yield from wrapped(f"{finding['claim']}: {finding['measured']}")
    yield from ("", f"{document['verdict']}  {document['findings_file']}")


def _step(step: Mapping[str, Any]) -> Iterator[str]:
    shape, whole = ("×".join(map(str, step[which])) for which in ("shape", "whole_shape"))
    size = shape if shape == whole else f"{shape} of {whole}"
    made = f"{step['collective']}: " if step["collective"] else ""
    off = "" if step["gap"] == 0 else f"; {step['gap']:.1e} off"
    yield from wrapped(f"{step['name']} = {made}{step['text']}   {size}, {PLACES[step['place']]}{off}")
    if step["why"]:
        yield from wrapped(f"({step['why']})", 2)
    yield from side_by_side(_blocks(step))


def _blocks(step: Mapping[str, Any]) -> list[Block]:
    values = [_rows(value) for value in step["ranks"]]
    if step["place"] == "whole" and all(value == values[0] for value in values):
        return [("every rank", values[0])]
    blocks = [(f"rank {rank}", value) for rank, value in enumerate(values)]
    if step["place"] == "partial":
        blocks.append(("sum: one device", _rows(step["one_device"])))
    return blocks


def _rows(value: list[Any]) -> list[list[float]]:
    """A matrix as it is; a vector as one row."""
    return value if isinstance(value[0], list) else [value]


def side_by_side(blocks: Sequence[Block], width: int = WIDTH) -> list[str]:
    """Blocks beside each other, as many as `width` takes, then the next ones below."""
    cell = max(len(f"{number:g}") for _, rows in blocks for row in rows for number in row) + 1
    drawn = [
        (title, ["".join(f"{number:>{cell}g}" for number in row) for row in rows]) for title, rows in blocks
    ]
    return beside(drawn, width)


def beside(blocks: Sequence[tuple[str, list[str]]], width: int = WIDTH) -> list[str]:
    """The same of blocks whose rows are drawn already."""
    drawn = []
    for title, lines in blocks:
        wide = max(len(title) + 1, *map(len, lines))
        drawn.append([f"{f' {title}':<{wide}}", *(f"{line:<{wide}}" for line in lines)])
    lines = []
    line_of: list[list[str]] = []
    for block in [*drawn, None]:
        used = sum(len(other[0]) + 3 for other in line_of)
        if line_of and (block is None or used + len(block[0]) + 3 > width):
            tall = max(map(len, line_of))
            full = [[*other, *[" " * len(other[0])] * (tall - len(other))] for other in line_of]
            lines += [("   " + "   ".join(row)).rstrip() for row in zip(*full, strict=True)]
            line_of = []
        if block is not None:
            line_of.append(block)
    return lines


def mistake_lines(mistake: Mapping[str, Any]) -> list[str]:
    """A mistake: what is wrong by it and where, what is still right, and whether it is caught."""
    told = mistake["example"]
    at = ", ".join(map(str, told["index"]))
    spoiled = ", ".join(f"{name} ({gap:.2g})" for name, gap in mistake["gaps"].items())
    differ = {True: "; ranks have different values", False: "; the same on all ranks", None: ""}[
        mistake.get("ranks_differ")
    ]
    return [
        paint(f"mistake: {mistake['title']}", "bold", sys.stdout),
        *wrapped(mistake["why"]),
        *wrapped(
            f"{told['value']}[{at}] on rank {told['rank']} is {told['found']:g}, right is {told['right']:g}{differ}"
        ),
        *wrapped(f"wrong (relative gap): {spoiled or 'nothing'}"),
        *wrapped(f"still right: {', '.join(mistake['still_right'])}"),
        *wrapped(f"Fourfold: {mistake['fourfold']}"),
        f" -> {'caught' if mistake['verdict'] == 'pass' else 'NOT caught'}",
    ]
