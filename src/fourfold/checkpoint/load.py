"""Loading: a census of what is there against what is wanted, then every rank reads its boxes and checks the bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import default_planner, state_dict_loader

from fourfold.checkpoint.manifest import STATE, FileRecord, Manifest
from fourfold.checkpoint.problems import damaged
from fourfold.checkpoint.storage_reader import SafetensorsReader
from fourfold.checkpoint.tensors import coverage_problems
from fourfold.checkpoint.together import as_one, gather_json, world_here
from fourfold.checkpoint.validate import read_manifest
from fourfold.spec.errors import DataError, Problem
from fourfold.spec.training import STATE_PARTS

SAME = "the Spec the checkpoint was saved with"
MISSING = f"{SAME}; or, if the model was given more: --set 'checkpoint.allow_missing=[\"{{name}}\"]'"
SURPLUS = f"{SAME}; or, if the model has less: --set 'checkpoint.allow_surplus=[\"{{name}}\"]'"
CHANGED = (
    f"{SAME}; or give it another name: the new one may be missing, the old one left over (see [checkpoint])"
)


def load(
    folder: Path | str,
    tensors: Mapping[str, torch.Tensor],
    *,
    allow_missing: Sequence[str] = (),
    allow_surplus: Sequence[str] = (),
) -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint in `folder`, and return its state.

    tensors: by name; of a DTensor each rank reads the boxes it holds, however they were cut when they were saved.
    allow_missing: names, or patterns with * and ?, of tensors that need not be in the checkpoint; they stay as they
        are. allow_surplus: of the checkpoint's tensors that no rank need want.
    Collectives: four small all-gathers, then those of torch.distributed.checkpoint.load on the default group: gather,
    scatter, all-gather of objects; none in a world of one.
    Raises DataError on every rank. Missing, surplus and changed entries are told at once, before anything is filled;
    a damaged file is found while it is read, and `tensors` may then hold anything.
    """
    folder = Path(folder)
    manifest, state = open_together(folder)
    wants = gather_json(
        {name: (str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors.items()}
    )
    wrong = coverage_problems(manifest, folder) or census(manifest, wants, allow_missing, allow_surplus)
    if wrong:
        raise DataError(wrong)
    held = {name: tensor for name, tensor in tensors.items() if name in manifest.tensors}
    reader = SafetensorsReader(folder, manifest, list(held))
    planner = default_planner.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with as_one(f"load the checkpoint {folder}"):
        state_dict_loader.load(held, storage_reader=reader, planner=planner, no_dist=world_here() == 1)
    return state


def census(
    manifest: Manifest,
    wanted: Sequence[Mapping[str, tuple[str, Sequence[int]]]],
    allow_missing: Sequence[str] = (),
    allow_surplus: Sequence[str] = (),
) -> list[Problem]:
    """All in which a checkpoint's tensors are not those wanted.

    wanted: for each rank, dtype (as torch names it) and shape by name; what one rank wants is no surplus for another.
    """
    missing, changed, named = {}, {}, set()
    for name, (dtype, shape) in (entry for of_rank in wanted for entry in of_rank.items()):
        named.add(name)
        record = manifest.tensors.get(name)
        want = f"{dtype} {tuple(shape)}"
        if record is None:
            if not is_named(name, allow_missing):
                missing[name] = want
        elif (record.dtype, record.shape) != (dtype, tuple(shape)):
            changed[name] = f"{record.dtype} {record.shape} in the checkpoint, {want} wanted"
    surplus = {
        name: f"{record.dtype} {record.shape}"
        for name, record in manifest.tensors.items()
        if name not in named and not is_named(name, allow_surplus)
    }
    return [
        *_told("missing from the checkpoint", missing, "it would keep a value not trained with it", MISSING),
        *_told("in the checkpoint but not wanted", surplus, "what is left out changes the run", SURPLUS),
        *_told("of another dtype or shape", changed, "no value is rounded, cut or filled up", CHANGED),
    ]


def _told(kind: str, entries: Mapping[str, str], why: str, instead: str) -> list[Problem]:
    return [
        Problem(
            asked=f"tensor {name}: {kind}",
            found=found,
            why=why,
            instead=instead.format(name=name) if name.startswith(STATE_PARTS) else SAME,
        )
        for name, found in sorted(entries.items())
    ]


def open_together(folder: Path | str) -> tuple[Manifest, dict[str, Any]]:
    """Manifest and state of a checkpoint, once all ranks have read the same ones.

    Collectives: two all-gathers on the default group. Raises DataError on every rank.
    """
    folder = Path(folder)
    problems: Sequence[Problem] = ()
    manifest, state = None, {}
    try:
        manifest = read_manifest(folder)
        state = _read_state(folder, manifest.files[STATE])
    except DataError as error:
        problems = error.problems
    told = gather_json(
        {
            "manifest": manifest and xxhash.xxh3_128_hexdigest(manifest.model_dump_json().encode()),
            "problems": [[p.asked, p.found, p.why, p.instead, p.where] for p in problems],
        }
    )
    found = dict.fromkeys(Problem(*parts) for of_rank in told for parts in of_rank["problems"])
    if found:
        raise DataError(list(found))
    assert manifest is not None, "read, or a problem was told"
    others = [rank for rank, of_rank in enumerate(told) if of_rank["manifest"] != told[0]["manifest"]]
    if others:
        raise DataError(_not_the_same(folder, others))
    return manifest, state


def _read_state(folder: Path, record: FileRecord) -> dict[str, Any]:
    why = "it is not as it was saved"
    try:
        data = (folder / STATE).read_bytes()
    except OSError as error:
        raise DataError(damaged(folder, STATE, error.strerror or str(error), why)) from error
    found = xxhash.xxh3_128_hexdigest(data)
    if found != record.xxh3_128:
        raise DataError(damaged(folder, STATE, f"its hash is {found}, not {record.xxh3_128}", why))
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(damaged(folder, STATE, f"not JSON: {error}", why)) from error
    if not isinstance(state, dict):
        raise DataError(damaged(folder, STATE, f"{type(state).__name__}, not an object", why))
    return state


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a tensor has one of these names, or fits one of these patterns with * and ?."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _not_the_same(folder: Path, ranks: Sequence[int]) -> Problem:
    return Problem(
        asked=f"load the checkpoint {folder}",
        found=f"rank {', '.join(map(str, ranks))} reads another manifest there than rank 0",
        why="ranks that load different checkpoints train different models",
        instead="a folder that every machine sees",
    )
