"""`fourfold layout show`: the grid of ranks and who talks to whom along each axis. (`list`: `cli.layout_list`.)"""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import Annotated, Any

from cyclopts import App, Parameter

from fourfold.cli.layout_drawn import group_table, picture, who_with_whom
from fourfold.cli.layout_list import list_layouts
from fourfold.cli.output import next_command, print_document
from fourfold.spec.grid import GROUPS, Grid
from fourfold.spec.layout_alone import Alone, layout_alone

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
    """Draw the grid of ranks on its nodes, who talks to whom along each axis, and which axes leave a node.

    Examples:

        fourfold layout show --world 8 --set layout.pp=2 --set layout.tp=2
        fourfold layout show tiny --world 4
        fourfold layout show --world 8 --set hardware.devices_per_node=4

    Parameters
    ----------
    spec
        A TOML file, or the name of a ready Spec. Without one only settings of [layout] count, and
        hardware.devices_per_node.
    world
        Ranks in all: the product of the degrees.
    set_
        One setting, `a.b=value`; may be repeated, and wins over the file.
    json
        Print one JSON document on stdout.
    """
    asked = _asked(spec, set_, world)
    grid = Grid.of(asked.layout)
    if json:
        print_document(document(asked, grid))
        return 0
    per_node = asked.devices_per_node
    print("\n".join([*picture(grid, per_node), *who_with_whom(grid, per_node), *group_table(grid, per_node)]))
    settings = "".join(f" --set {quote(setting)}" for setting in set_)
    if spec is None:
        next_command(f"fourfold layout show tiny --world {world}{settings}")
    else:
        next_command(f"fourfold train {quote(spec)} --nproc {world}{settings} --dry-run")
    return 0


def _asked(source: str | None, sets: Sequence[str], world: int) -> Alone:
    if source is None:
        return layout_alone(sets, world)
    from fourfold.spec.fit import fit
    from fourfold.spec.load import load_spec
    from fourfold.spec.rules import judge, require

    loaded = load_spec(source, sets, world)
    fitted = loaded.spec.model_copy(update={"layout": fit(loaded.spec.layout, world, judge(loaded.spec))})
    require(fitted, "always", loaded.provenance, world)
    return Alone(fitted.layout, fitted.hardware.devices_per_node)


def document(asked: Alone, grid: Grid) -> dict[str, Any]:
    """What `--json` prints: the settled layout, each rank's coordinate, and the groups of every axis and product.

    crossing: by axis, how many of its groups have ranks on more than one node.
    """
    per_node = asked.devices_per_node
    return {
        "schema": "fourfold.layout/1",
        "world": grid.world,
        "devices_per_node": per_node,
        "nodes": -(-grid.world // per_node),
        "layout": asked.layout.model_dump(mode="json"),
        "coordinates": [grid.coordinate(rank) for rank in range(grid.world)],
        "groups": {axis: grid.groups(axis) for axis in GROUPS},
        "crossing": {axis: grid.crossing(axis, per_node) for axis in GROUPS},
    }
