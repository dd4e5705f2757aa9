"""`fourfold layout show`: the grid of ranks and who talks to whom along each axis. (`list`: `cli.layout_list`.)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from shlex import quote
from typing import Annotated, Any

from cyclopts import App, Parameter

from fourfold.cli.layout_list import list_layouts
from fourfold.cli.output import WIDTH, next_command, print_document
from fourfold.spec.grid import AXES, GROUPS, Grid
from fourfold.spec.training import LayoutSpec
from fourfold.spec.words import counted

MEANING = {
    "dp": "dp_replicate × dp_shard: see different samples",
    "fsdp": "dp_shard × cp: ZeRO cuts parameters, gradients and moments over them",
    "ep": "borrowed from tp, then cp, then dp_shard: hold different experts",
    "edp": "the ranks of a pipeline stage that hold the same experts",
}

# Not "Examples:", which cyclopts takes out of a group's help.
app = App(
    name="layout",
    help="""Show which rank stands where on the mesh and who talks to whom, and list the layouts of a Spec.

For example:

    fourfold layout show --world 8 --set layout.pp=2 --set layout.tp=2
    fourfold layout list tiny --world 8
    fourfold layout show tiny --world 4 --set layout.zero=3 --json
""",
)
app.command(list_layouts, name="list")


@app.command
def show(
    spec: str | None = None,
    /,
    *,
    world: int,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", consume_multiple=False)] = (),
    json: bool = False,
) -> int:
    """Print the grid of ranks, and every axis's groups of ranks.

    Examples:

        fourfold layout show --world 8 --set layout.pp=2 --set layout.tp=2
        fourfold layout show tiny --world 4
        fourfold layout show --world 16 --set layout.tp=8 --json

    Parameters
    ----------
    spec
        A TOML file, or the name of a ready Spec. Without one only settings of [layout] count.
    world
        Ranks in all: the product of the degrees.
    set_
        One setting, `a.b=value`; may be repeated, and wins over the file.
    json
        Print one JSON document on stdout.
    """
    layout = _layout(spec, set_, world)
    grid = Grid.of(layout)
    if json:
        print_document(document(layout, grid))
        return 0
    print("\n".join([*picture(grid), "", *group_table(grid)]))
    settings = "".join(f" --set {quote(setting)}" for setting in set_)
    if spec is None:
        next_command(f"fourfold layout show tiny --world {world}{settings}")
    else:
        next_command(f"fourfold train {quote(spec)} --nproc {world}{settings} --dry-run")
    return 0


def _layout(source: str | None, sets: Sequence[str], world: int) -> LayoutSpec:
    if source is None:
        from fourfold.spec.layout_alone import layout_alone

        return layout_alone(sets, world)
    from fourfold.spec.fit import fit
    from fourfold.spec.load import load_spec
    from fourfold.spec.rules import judge, require

    loaded = load_spec(source, sets, world)
    fitted = loaded.spec.model_copy(update={"layout": fit(loaded.spec.layout, world, judge(loaded.spec))})
    require(fitted, "always", loaded.provenance, world)
    return fitted.layout


def document(layout: LayoutSpec, grid: Grid) -> dict[str, Any]:
    """What `--json` prints: the settled layout, each rank's coordinate, and the groups of every axis and product."""
    return {
        "schema": "fourfold.layout/1",
        "world": grid.world,
        "layout": layout.model_dump(mode="json"),
        "coordinates": [grid.coordinate(rank) for rank in range(grid.world)],
        "groups": {axis: grid.groups(axis) for axis in GROUPS},
    }


def picture(grid: Grid) -> list[str]:
    """The grid as a table, at most 80 columns wide: the innermost axis in use runs across, the others down.

    An axis too long for a line goes on in the next: then it has a column too, and its heads are "+0 +1 ...".
    """
    *down, across = [axis for axis in AXES if grid.degree(axis) > 1] or ["dp_replicate"]
    degree = grid.degree(across)
    cell = max(len(str(grid.world - 1)), len(str(degree - 1)) + 1)
    room = (WIDTH - sum(len(axis) + 2 for axis in [*down, across]) - 1) // (cell + 1)
    cut = degree > room
    run = max(room // 8 * 8, 1) if cut else degree
    labels, name = ([*down, across], "") if cut else (down, across)

    def line(marks: Sequence[object], head: str, cells: Iterable[object]) -> str:
        left = "  ".join(f"{mark!s:>{len(axis)}}" for mark, axis in zip(marks, labels, strict=True))
        right = " ".join(f"{entry!s:>{cell}}" for entry in cells)
        return f"{left + ' | ' if labels else ''}{head:<{len(name)}} {right}"

    lines = [line(labels, name, (f"+{index}" if cut else index for index in range(run)))]
    for group in grid.groups(across):
        place = grid.coordinate(group[0])
        for start in range(0, degree, run):
            marks = [place[axis] for axis in down] + ([start] if cut else [])
            lines.append(line(marks, "", group[start : start + run]))
    return [_title(grid), "", *lines]


def group_table(grid: Grid) -> list[str]:
    """Every axis's and product's groups of ranks, one entry each, at most 80 columns wide where a group is."""
    lines = [f"{'axis':<12} {'ranks':>5}  groups of ranks"]
    for axis in GROUPS:
        texts = (
            [_ranks(group) for group in grid.groups(axis)] if grid.degree(axis) > 1 else ["each rank alone"]
        )
        rows = _fill(texts, WIDTH - 20)
        lines.append(f"{axis:<12} {grid.degree(axis):>5}  {rows[0]}")
        lines += [f"{'':<20}{row}" for row in rows[1:]]
    return [*lines, "", *(f"{name:<5}{meaning}" for name, meaning in MEANING.items())]


def _title(grid: Grid) -> str:
    degrees = " × ".join(f"{axis} {grid.degree(axis)}" for axis in AXES)
    borrowed = f"; ep {grid.ep}" if grid.ep > 1 else ""
    return f"{counted(grid.world, 'rank')} = {degrees}{borrowed}"


def _ranks(group: Sequence[int]) -> str:
    """A group in few letters: "0-7" for neighbours, "0 8 .. 56" for equal steps, else every rank."""
    steps = {after - before for before, after in pairwise(group)}
    if steps == {1} and len(group) > 2:
        return f"{group[0]}-{group[-1]}"
    if len(steps) == 1 and len(group) > 8:
        return f"{group[0]} {group[1]} .. {group[-1]}"
    return " ".join(map(str, group))


def _fill(texts: Sequence[str], width: int) -> list[str]:
    """`texts` with " | " between them, in lines of at most `width` where a single text is no longer."""
    rows = [texts[0]]
    for text in texts[1:]:
        if len(rows[-1]) + len(text) + 3 <= width:
            rows[-1] += f" | {text}"
        else:
            rows.append(text)
    return rows
