"""`fourfold layout list`: the layouts that a Spec can be trained with on so many ranks, and what refuses the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product, zip_longest
from shlex import quote
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fourfold.cli.output import WIDTH, next_command, print_document, story, table
from fourfold.spec.model import ImportSpec
from fourfold.spec.words import counted

if TYPE_CHECKING:
    from fourfold.spec.layouts import Layouts, Refused
    from fourfold.spec.training import LayoutSpec

_ALWAYS_SHOWN = ("dp_replicate", "dp_shard", "tp")
_FAMILY_WIDTH = 22


def list_layouts(
    spec: str,
    /,
    *,
    world: int,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", consume_multiple=False)] = (),
    json: bool = False,
) -> int:
    """List the distinct layouts that a Spec can be trained with, and what refuses the others.

    A setting that would change nothing makes no other layout: sp without tp, zero with one rank to shard over.

    Examples:

        fourfold layout list tiny --world 8
        fourfold layout list llama3-8b --world 64
        fourfold layout list my.toml --world 4 --set model.heads=6 --json

    Parameters
    ----------
    spec
        A TOML file, or the name of a ready Spec. Its own degrees, ep, zero and sp do not count.
    world
        Ranks in all: the product of the degrees.
    set_
        One setting, `a.b=value`; may be repeated, and wins over the file.
    json
        Print one JSON document on stdout.
    """
    from fourfold.spec.layouts import NOT_READ, layouts
    from fourfold.spec.load import load_spec

    loaded = load_spec(spec, (*set_, *NOT_READ), world)
    listed = layouts(loaded.spec, world)
    if json:
        print_document(document(spec, world, listed))
        return 0
    print("\n".join([*legal_lines(loaded.spec.name, world, listed), *refused_lines(listed.refused)]))
    if isinstance(loaded.spec.model, ImportSpec):
        for note in _of_an_imported_model(listed.legal):
            story(f"note: {note}")
    settings = "".join(f" --set {quote(setting)}" for setting in set_)
    if listed.legal:
        next_command(f"fourfold verify equal {quote(spec)} --world {world}{settings} --all")
    else:
        next_command(f"fourfold spec show {quote(spec)}{settings}")
    return 0


def document(source: str, world: int, listed: Layouts) -> dict[str, Any]:
    """What `--json` prints: the layouts in full, and each refused family with its reason and whose refusal it is."""
    return {
        "schema": "fourfold.layout.list/1",
        "source": source,
        "world": world,
        "count": len(listed.legal),
        "layouts": [layout.model_dump(mode="json") for layout in listed.legal],
        "refused": [
            {
                "family": refused.family,
                "count": refused.count,
                "rule": refused.rule,
                "owed": refused.owed,
                "found": refused.problem.found,
                "why": refused.problem.why,
            }
            for refused in listed.refused
        ],
    }


def legal_lines(name: str, world: int, listed: Layouts) -> list[str]:
    """The layouts as a table: a line for all that differ in zero and sp alone."""
    count = len(listed.legal)
    title = f"{name} on {counted(world, 'rank')}: {counted(count, 'layout') if count else 'no layouts'}"
    if not listed.legal:
        return [title]
    axes = [axis for axis in _axes() if any(_used(layout, axis) for layout in listed.legal)]
    rows = []
    for degrees, group in groupby(listed.legal, lambda layout: [str(getattr(layout, axis)) for axis in axes]):
        rows += [[*degrees, *cells] for cells in _options(list(group))]
    return [title, "", table((*axes, "zero", "sp", "layouts"), rows)]


def refused_lines(families: Sequence[Refused]) -> list[str]:
    """The refused families as a table."""
    if not families:
        return []
    rows: list[tuple[str, str, str]] = []
    for refused in families:
        reason = refused.problem.found
        if refused.owed != "not built":
            reason += f": {refused.problem.why}"
        left = wrap(refused.family, _FAMILY_WIDTH)
        right = wrap(f"[{refused.owed}] {reason}", WIDTH - _FAMILY_WIDTH - 11)
        rows += zip_longest(left, [f"{refused.count:,}"], right, fillvalue="")
    return ["", table(("refused", "layouts", "because"), rows)]


def _of_an_imported_model(legal: Sequence[LayoutSpec]) -> Iterator[str]:
    """What only the model itself can say of the layouts listed: it is not built for a list."""
    if any(layout.tp > 1 for layout in legal):
        yield "what tp can cut of an imported model is known once it is built: its sharding() says"
    if any(layout.cp > 1 for layout in legal):
        yield "whether it can be cut over cp shows in its first forward: it attends by batch.context"
    if any(layout.pp > 1 for layout in legal):
        yield "for pp it needs ends(), stream() and part() (docs/own_model.md, stages)"
    if any(layout.ep > 1 for layout in legal):
        yield "for ep it needs experts in Stacks and a Meeting (docs/own_model.md)"


def _options(group: Sequence[LayoutSpec]) -> Iterator[tuple[str, str, str]]:
    """zero, sp and how many: in one line where every zero goes with every sp, else a line for each sp."""
    zeros = sorted({layout.zero for layout in group})
    words = {False: "no", True: "yes"}
    sps = sorted({layout.sp for layout in group})
    pairs = {(layout.zero, layout.sp) for layout in group}
    if pairs == set(product(zeros, sps)):
        yield " ".join(map(str, zeros)), " ".join(words[sp] for sp in sps), str(len(group))
        return
    for sp in sps:
        own = [zero for zero in zeros if (zero, sp) in pairs]
        yield " ".join(map(str, own)), words[sp], str(len(own))


def _axes() -> tuple[str, ...]:
    from fourfold.spec.grid import AXES

    return (*AXES, "ep")


def _used(layout: LayoutSpec, axis: str) -> bool:
    return axis in _ALWAYS_SHOWN or getattr(layout, axis) > 1
