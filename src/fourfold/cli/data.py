"""`fourfold data`: text made into a token file, and what a Spec's data amounts to."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from fourfold.cli.output import next_command, print_document, story, table
from fourfold.spec.load import load_spec
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted

if TYPE_CHECKING:
    from fourfold.data.sample import Source

_JSONL = (".jsonl", ".ndjson")

app = App(
    name="data",
    help="""Prepare text as a token file; show what a Spec's data amounts to.

    For example:

        fourfold data show tiny
        fourfold data prepare corpus.jsonl corpus.bin --field body
        fourfold train tiny --set data.kind=tokens --set data.path=corpus.bin
    """,
)


@app.command
def prepare(
    source: str,
    output: str,
    /,
    *,
    kind: Literal["text", "jsonl"] | None = None,
    field: str = "text",
    json: bool = False,
) -> None:
    """Write text as a token file of bytes, which a run maps into memory: for a corpus larger than that.

    It takes little memory, whatever the size. A file that exists is never overwritten.

    Examples:

        fourfold data prepare book.txt book.bin
        fourfold data prepare folder-of-txt/ corpus.bin
        fourfold data prepare lines.jsonl corpus.bin --field body --json

    Parameters
    ----------
    source
        A text file, a folder of *.txt files, or a file of JSON lines.
    output
        The token file: three files, NAME.bin, NAME.offsets and NAME.json.
    kind
        What the input is. Default: jsonl for *.jsonl and *.ndjson, else text.
    field
        Of JSON lines: the field that holds the text.
    json
        Print one JSON document.
    """
    from fourfold.data.tokens import prepare as write
    from fourfold.data.tokens import token_paths

    chosen = kind or ("jsonl" if Path(source).suffix in _JSONL else "text")
    header = write(source, output, chosen, field)
    place = str(token_paths(output)[0])
    if json:
        document = header.model_dump(mode="json", by_alias=True)
        print_document({"schema": "fourfold.data.prepare/1", "path": place, "header": document})
    else:
        counts = f"{counted(header.documents, 'document', ',')}, {counted(header.tokens, 'token', ',')}"
        print(f"{place}: {counts}, the longest document {header.longest_document:,}")
        print(f"content hash {header.content_hash}")
    next_command(f"fourfold train tiny --set data.kind=tokens --set {quote(f'data.path={place}')}")


@app.command
def show(
    spec: str,
    /,
    *,
    sets: Annotated[tuple[str, ...], Parameter(name="--set", consume_multiple=False)] = (),
    json: bool = False,
) -> None:
    """Open a Spec's data and print what is in it; a token file is compared with its header in full.

    Examples:

        fourfold data show tiny
        fourfold data show tiny --set data.sequence=512
        fourfold data show my.toml --json

    Parameters
    ----------
    spec
        A TOML file, or the name of a ready Spec (fourfold spec list).
    sets
        One setting, a.b=value in TOML, over the file; may be repeated.
    json
        Print one JSON document.
    """
    from fourfold.data.source import open_sources

    loaded = load_spec(spec, sets)
    sources = open_sources(loaded.spec, verify_up_to=sys.maxsize)
    steps = _steps(loaded.spec, len(sources.train))
    parts = {"train": sources.train, "validation": sources.validation}
    counts = {name: _counts(part) for name, part in parts.items()}
    if json:
        told = {"source": spec, "kind": loaded.spec.data.kind, "content_hash": sources.content_hash}
        document = {"schema": "fourfold.data/1", **told, **counts, "steps_per_epoch": steps}
        print_document({**document, "notes": [*loaded.notes, *sources.notes]})
    else:
        _print(loaded.spec, counts, sources.content_hash, steps)
    for note in (*loaded.notes, *sources.notes):
        story(f"note: {note}")
    command = f"{quote(spec)}{''.join(f' --set {quote(setting)}' for setting in sets)}"
    if steps == 0:
        story("note: fewer training samples than one global batch; training would refuse to start")
        next_command(f"fourfold data show {command} --set data.last_batch=keep")
    else:
        next_command(f"fourfold train {command} --nproc 2")


def _counts(part: Source | None) -> dict[str, int] | None:
    return None if part is None else part.counts()


def _steps(spec: Spec, samples: int) -> int | None:
    """Steps of an epoch, where the Spec gives the global batch itself."""
    from fourfold.data.schedule import steps_per_epoch

    batch = spec.batch.global_batch
    return None if batch is None else steps_per_epoch(samples, batch, spec.data.last_batch)


def _print(spec: Spec, counts: dict[str, Any], content_hash: str, steps: int | None) -> None:
    names = list(counts["train"])
    rows = [
        (part, *(f"{found[name]:,}" if found else "none" for name in names)) for part, found in counts.items()
    ]
    print(table(("", *(name.replace("_", " ") for name in names)), rows))
    print()
    if steps is None:
        print("steps per epoch  n/a: batch.global_batch is not given")
    else:
        batch = f"global batch {spec.batch.global_batch}, last batch: {spec.data.last_batch}"
        print(f"steps per epoch  {steps:,} ({batch})")
    print(f"content hash     {content_hash}")
