"""How an unfinished run goes on: the command, made from its own request and tried out before it is told."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from fourfold.record.reader import RunReader
from fourfold.spec.errors import FourfoldError, SpecError
from fourfold.spec.keys import toml_word
from fourfold.spec.load import load_spec
from fourfold.spec.settings import parse_setting
from fourfold.spec.settle import settle
from fourfold.train.resume import differences


def going_on(reader: RunReader) -> str:
    """The command with which this run goes on, on as many ranks; it asks for the same Spec as the run was begun with.

    spec.toml is the request as it was read; what `--set` had changed is set again, and a name that was the file's.
    Where that cannot be had from the record, it is the command that was typed, with --resume.
    """
    plan, request = reader.plan(), shlex.quote(str(reader.dir.spec_toml))
    world, nproc = plan.get("world", 1), plan.get("nproc", 1)
    typed = [word for word in plan.get("command", ()) if isinstance(word, str)]
    start = f"fourfold train {request} --nproc {nproc}"
    if nproc != world:
        nodes = math.ceil(world / nproc)
        start = f"torchrun --nnodes {nodes} --nproc-per-node {nproc} … -m fourfold train {request}"
    settings = _settings(reader, world)
    if settings is None:
        start, settings = shlex.join(_without(typed, "--resume")) or start, []
    elif "--max-restarts" in typed[:-1]:
        start += f" --max-restarts {shlex.quote(typed[typed.index('--max-restarts') + 1])}"
    settings.append(_set("run.dir", str(reader.dir.path)))
    return " ".join([start, *(f"--set {shlex.quote(one)}" for one in settings), "--resume auto"])


def _without(words: Sequence[str], option: str) -> list[str]:
    """A command without an option and its value."""
    return [word for before, word in pairwise(["", *words]) if option not in (word, before)]


def _settings(reader: RunReader, world: int) -> list[str] | None:
    """What must be set over spec.toml so that the run's own Spec comes out; None if nothing makes it come out."""
    before = reader.spec().model_dump(mode="json")
    keys = [key for key, where in reader.provenance().items() if where.startswith("--set")]
    found = _tried(reader, world, before, keys)
    # Where `--set` changed the kind of a section, and to the default one, no provenance has it.
    return found if found is not None else _tried(reader, world, before, ["model.kind", "data.kind", *keys])


def _tried(
    reader: RunReader, world: int, before: Mapping[str, Any], first: Sequence[str]
) -> list[str] | None:
    """Set these keys; then also what still differs, as a `--set` to a default does."""
    keys = dict.fromkeys(sorted(first, key=lambda key: not key.endswith(".kind")))
    keys.pop("run.dir", None)
    for _ in range(2):
        settings = [_set(key, _at(before, key)) for key in keys]
        try:
            loaded = load_spec(reader.dir.spec_toml, settings)
            differing = differences(before, settle(loaded.spec, world).model_dump(mode="json"))
        except FourfoldError:
            return None
        if not differing:
            return settings
        keys.update(dict.fromkeys(key for key, _, _ in differing))
    return None


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part] if isinstance(values, Mapping) else None
    return values


def _set(key: str, value: Any) -> str:
    """A setting as `--set` takes it; a plain word goes without quotes."""
    bare = f"{key}={value}"
    with suppress(SpecError):
        if isinstance(value, str) and parse_setting(bare).value == value:
            return bare
    return f"{key}={toml_word(value)}"
