"""`fourfold spec`: what a Spec says when all is resolved, which ones are ready, and a copy to start from."""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, Parameter

from fourfold.cli.output import next_command, print_document, story, table
from fourfold.spec.load import LoadedSpec, load_spec
from fourfold.spec.ready import copy_ready, ready_names, ready_text
from fourfold.spec.rules import check
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec

app = App(
    name="spec",
    help="""Show, list and copy Specs.

    For example:

        fourfold spec show tiny --world 4
        fourfold spec show my.toml --set optimizer.lr=6e-3 --json
        fourfold spec copy small my.toml
    """,
)


@app.command
def show(
    spec: str,
    /,
    *,
    world: int | None = None,
    sets: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
    json: bool = False,
) -> None:
    """Print a Spec with every setting resolved, and where each one that is no default came from.

    What is printed is a Spec again: `fourfold spec show tiny > my.toml`.

    Examples:

        fourfold spec show tiny
        fourfold spec show tiny --world 4 --set batch.micro_batch=4
        fourfold spec show my.toml --json

    Parameters
    ----------
    spec
        A TOML file, or the name of a ready Spec (fourfold spec list).
    world
        Ranks in all: degrees that are "auto" and the batch's third number become plain numbers.
    sets
        One setting, a.b=value in TOML, over the file; may be repeated.
    json
        Print one JSON document.
    """
    from fourfold.spec.show import computed, to_toml

    loaded = load_spec(spec, sets, world)
    settled = loaded.spec if world is None else settle(loaded.spec, world, loaded.provenance)
    remarks = {**loaded.provenance, **computed(loaded.spec, settled, world)}
    if json:
        document = {"schema": "fourfold.spec/1", "source": spec, "world": world, "provenance": remarks}
        print_document({**document, "notes": loaded.notes, "spec": settled.model_dump(mode="json")})
    else:
        print(to_toml(settled, remarks), end="")
    for note in loaded.notes:
        story(f"note: {note}")
    _next(spec, loaded, settled, world, sets)


@app.command(name="list")
def list_(*, json: bool = False) -> None:
    """Print the ready Specs: to train at once, or to plan with.

    For example:

        fourfold spec list
        fourfold spec list --json
        fourfold spec show tiny

    Parameters
    ----------
    json
        Print one JSON document.
    """
    entries = [_listed(name) for name in ready_names()]
    entries.sort(key=lambda entry: entry["parameters"])
    if json:
        print_document({"schema": "fourfold.spec.list/1", "specs": entries})
    else:
        rows = [
            (e["name"], e["use"], f"{e['parameters']:,}" if e["parameters"] else "-", e["note"])
            for e in entries
        ]
        print(table(("name", "to", "parameters", ""), rows))
    next_command("fourfold spec show tiny", "fourfold spec copy tiny my.toml")


@app.command
def schema(*, _json: Annotated[bool, Parameter(name="--json")] = True) -> None:
    """Print the JSON Schema of a Spec, for editors that complete and check TOML.

    For example:

        fourfold spec schema
        fourfold spec schema > fourfold.schema.json
        fourfold spec show tiny --json

    Parameters
    ----------
    _json
        It is JSON in any case.
    """
    from fourfold.spec.keys import json_schema

    dialect = "https://json-schema.org/draft/2020-12/schema"
    print_document({"$schema": dialect, "schema": "fourfold.spec.schema/1", **json_schema()})


@app.command
def copy(name: str, to: str | None = None, /, *, json: bool = False) -> None:
    """Copy a ready Spec to a file, to change it. A file that exists is never overwritten.

    Examples:

        fourfold spec copy tiny
        fourfold spec copy small my.toml
        fourfold spec copy llama3-8b specs/

    Parameters
    ----------
    name
        The name of a ready Spec (fourfold spec list).
    to
        A file or a folder. Default: NAME.toml here.
    json
        Print one JSON document.
    """
    path = copy_ready(name, to)
    if json:
        print_document({"schema": "fourfold.spec.copy/1", "name": name, "path": str(path)})
    else:
        print(path)
    next_command(f"fourfold spec show {shlex.quote(str(path))}")


def _listed(name: str) -> dict[str, Any]:
    """A ready Spec in a line. One of transformers is not loaded: that would take the extra, and seconds."""
    from fourfold.plan.parameters import count_parameters

    raw = tomllib.loads(ready_text(name))
    if raw["model"].get("kind") == "huggingface":
        return {"name": name, "use": "train", "parameters": 0, "note": f"{raw['note']} (extra hf)"}
    spec = load_spec(name).spec
    use = "plan" if check(spec, "train") else "train"
    return {"name": name, "use": use, "parameters": count_parameters(spec.model) or 0, "note": spec.note}


def _next(source: str, loaded: LoadedSpec, settled: Spec, world: int | None, sets: Sequence[str]) -> None:
    settings = "".join(f" --set {shlex.quote(text)}" for text in sets)
    name = shlex.quote(source)
    problems = check(settled, "train", loaded.provenance)
    if not problems:
        next_command(f"fourfold train {name} --nproc {world or 2}{settings}")
        return
    planned = [f"{p.asked.removeprefix('train with ')} ({p.found.partition(',')[0]})" for p in problems]
    story(f"to plan with, not to train yet: {', '.join(planned)}")
    layout = loaded.spec.layout
    degrees = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    ranks = world or math.prod(degree for degree in degrees if degree != "auto")
    next_command(f"fourfold layout show {name} --world {ranks}{settings}")
