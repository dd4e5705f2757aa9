"""How `fourfold layout show` draws a grid of ranks: on its nodes, as groups by letter, and as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from string import ascii_lowercase

from fourfold.cli.output import WIDTH, paint, wrapped
from fourfold.spec.grid import AXES, GROUPS, Grid
from fourfold.spec.words import counted

_SHOWN = tuple(axis for axis in GROUPS if axis != "efsdp")  # edp without dp_replicate
MEANING = {
    "dp": "dp_replicate × dp_shard: see different samples",
    "fsdp": "dp_shard × cp: ZeRO cuts parameters, gradients and moments over them",
    "ep": "borrowed from tp, then cp, then dp_shard: hold different experts",
    "edp": "the ranks of a pipeline stage that hold the same experts",
}
FIRST, LAST = 8, 4  # rows of a grid that are drawn where it has more than both and two
MOST_LETTERS = 16  # ranks that are drawn side by side
LINES = 2  # of an axis's groups


def picture(grid: Grid, per_node: int) -> list[str]:
    """The grid as a table, at most 80 columns wide: the innermost axis in use runs across, the others down.

    A line stands above the first row of each node, a bar within a row where a node begins. An axis too long for a line
    goes on in the next: then it has a column too, and its heads are "+0 +1 ...". Of many rows some are left out.
    """
    *down, across = [axis for axis in AXES if grid.degree(axis) > 1] or ["dp_replicate"]
    degree = grid.degree(across)
    cell = max(len(str(grid.world - 1)), len(str(degree - 1)) + 1)
    room = (WIDTH - sum(len(axis) + 2 for axis in [*down, across]) - 1) // (cell + 1)
    cut = degree > room
    run = max(room // 8 * 8, 1) if cut else degree
    labels, name = ([*down, across], "") if cut else (down, across)

    def line(marks: Sequence[object], head: str, cells: Iterable[str]) -> str:
        left = "  ".join(f"{mark!s:>{len(axis)}}" for mark, axis in zip(marks, labels, strict=True))
        return f"{left + ' : ' if labels else ''}{head:<{len(name)}}{''.join(cells)}"

    heads = (f" {f'+{index}' if cut else index:>{cell}}" for index in range(run))
    rows = []
    for group in grid.groups(across):
        place = grid.coordinate(group[0])
        for start in range(0, degree, run):
            ranks = group[start : start + run]
            marks = [place[axis] for axis in down] + ([start] if cut else [])
            rows.append((ranks, line(marks, "", _cells(ranks, per_node, cell))))
    return [
        *wrapped(_title(grid, per_node), 0),
        "",
        line(labels, name, heads),
        *_on_nodes(rows, per_node),
        "",
    ]


def who_with_whom(grid: Grid, per_node: int) -> list[str]:
    """All ranks side by side, and for each axis in use a letter under each: that of its group. Of few ranks only."""
    axes = _used(grid)
    if not axes or grid.world > MOST_LETTERS:
        return []
    cell = len(str(grid.world - 1)) + 1
    label = max(map(len, axes))
    lines = [paint("who talks to whom: the same letter, the same group", "bold", sys.stdout)]
    lines.append(f"{'rank':<{label}} {''.join(_cells(range(grid.world), per_node, cell))}")
    for axis in axes:
        letters = dict.fromkeys(range(grid.world), "")
        for letter, group in zip(ascii_lowercase, grid.groups(axis), strict=False):
            letters |= dict.fromkeys(group, letter)
        marks = "".join(_cells(range(grid.world), per_node, cell, letters))
        lines.append(f"{axis:<{label}} {marks}")
    return [*lines, ""]


def group_table(grid: Grid, per_node: int) -> list[str]:
    """Every axis's and product's groups of ranks, as many as stand in two lines; which axes stay inside a node."""
    lines = [f"{'axis':<12} {'ranks':>5} {'groups':>6}  {'nodes':<8}  groups of ranks"]
    for axis in _SHOWN:
        groups = grid.groups(axis)
        alone = grid.degree(axis) == 1
        rows = ["each rank alone"] if alone else _fill([_ranks(group) for group in groups], WIDTH - 38)
        head = f"{axis:<12} {grid.degree(axis):>5} {len(groups):>6}  {_reach(grid, axis, per_node):<8}  "
        lines += [f"{head if number == 0 else ' ' * 36}{row}" for number, row in enumerate(rows)]
    return [
        *lines,
        "",
        *_nodes(grid, per_node),
        *(f"{name:<5}{meaning}" for name, meaning in MEANING.items()),
    ]


def _title(grid: Grid, per_node: int) -> str:
    degrees = " × ".join(f"{axis} {grid.degree(axis)}" for axis in AXES)
    borrowed = f"; ep {grid.ep}" if grid.ep > 1 else ""
    nodes = -(-grid.world // per_node)
    where = f"; {counted(nodes, 'node')} of {per_node}" if nodes > 1 else ""
    return f"{counted(grid.world, 'rank')} = {degrees}{borrowed}{where}"


def _cells(
    ranks: Sequence[int], per_node: int, cell: int, marks: dict[int, str] | None = None
) -> Iterable[str]:
    """A cell for each rank, or for its mark, with a bar before the first one of a node that is not the row's first."""
    for rank in ranks:
        bar = "|" if rank % per_node == 0 and rank != ranks[0] else " "
        yield f"{bar}{rank if marks is None else marks[rank]!s:>{cell}}"


def _on_nodes(rows: Sequence[tuple[Sequence[int], str]], per_node: int) -> list[str]:
    """The rows, with a line above each node's first one where there are several nodes; the middle of many left out."""
    last = rows[-1][0][-1]
    long = max(len(text) for _, text in rows)
    out = range(FIRST, len(rows) - LAST) if len(rows) > FIRST + LAST + 2 else range(0)
    lines: list[str] = []
    above = -1
    for number, (ranks, text) in enumerate(rows):
        if number in out:
            if number == out[0]:
                left = f"ranks {ranks[0]} to {rows[out[-1]][0][-1]}"
                lines.append(f"... {counted(len(out), 'row')} more: {left}")
            above = -1
            continue
        node, end = ranks[0] // per_node, ranks[-1] // per_node
        if last >= per_node and node != above:
            name = f"node {node}" if node == end else f"nodes {node} to {end}"
            lines.append(f"{name} {'-' * (long - len(name) - 1)}")
        above = end
        lines.append(text)
    return lines


def _reach(grid: Grid, axis: str, per_node: int) -> str:
    """Whether the groups of an axis stay inside a node: "inside", "cross", or how many of them cross."""
    if grid.degree(axis) == 1:
        return "-"
    crossing, groups = grid.crossing(axis, per_node), grid.world // grid.degree(axis)
    return "inside" if not crossing else "cross" if crossing == groups else f"{crossing} cross"


def _nodes(grid: Grid, per_node: int) -> list[str]:
    """In words: which axes talk inside a node, which between nodes."""
    used = _used(grid)
    if not used:
        return []
    inside = [axis for axis in used if not grid.crossing(axis, per_node)]
    across = [axis for axis in used if axis not in inside]
    if not across:
        return [*wrapped(f"all of them inside a node of {counted(per_node, 'device')}", 0), ""]
    return [
        *wrapped(f"inside a node of {counted(per_node, 'device')}: {', '.join(inside) or 'no axis'}", 0),
        *wrapped(f"between nodes: {', '.join(across)}", 0),
        "",
    ]


def _used(grid: Grid) -> list[str]:
    """Axes and products of more than one rank, those of experts only where experts are cut."""
    unused = ("world",) if grid.ep > 1 else ("world", "edp")
    return [axis for axis in _SHOWN if grid.degree(axis) > 1 and axis not in unused]


def _ranks(group: Sequence[int]) -> str:
    """A group in few letters: "0-7" for neighbours, "0 8 .. 56" for equal steps, else every rank."""
    steps = {after - before for before, after in pairwise(group)}
    if steps == {1} and len(group) > 2:
        return f"{group[0]}-{group[-1]}"
    if len(steps) == 1 and len(group) > 4:
        return f"{group[0]} {group[1]} .. {group[-1]}"
    return " ".join(map(str, group))


def _fill(texts: Sequence[str], width: int) -> list[str]:
    """`texts` with " | " between them, in lines of at most `width` where a single text is no longer.

    What does not stand in two lines is counted in a third.
    """
    rows = [texts[0]]
    for number, text in enumerate(texts[1:], 1):
        if len(rows[-1]) + len(text) + 3 <= width:
            rows[-1] += f" | {text}"
        elif len(rows) == LINES:
            return [*rows, f"... {counted(len(texts) - number, 'group')} more"]
        else:
            rows.append(text)
    return rows
