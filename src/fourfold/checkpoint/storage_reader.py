"""torch's distributed checkpointing, reading side: its planner decides which boxes a rank needs, this is the storage.

What torch calls metadata is made from the manifest. Every file is hashed by one rank of each machine while it is
read: the one that needs most of it.
"""

from __future__ import annotations

import math
import os
import socket
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fourfold.checkpoint.manifest import Chunk, Manifest, TensorRecord
from fourfold.checkpoint.shard_file import Request, Wanted, read_shard
from fourfold.spec.boxes import Box
from fourfold.spec.errors import DataError, Problem


class Needs(NamedTuple):
    """A rank's machine, and the elements it needs of each file."""

    machine: str
    elements: dict[str, int]


class SafetensorsReader(StorageReader):
    """One load of some tensors of a checkpoint; torch calls its methods in the order in which they stand here."""

    def __init__(self, folder: Path, manifest: Manifest, names: Collection[str]) -> None:
        """names: of the manifest's tensors, those that this rank wants."""
        self._folder = folder
        self._manifest = manifest
        self._names = names

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """No id is taken: the folder is given to the constructor."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader is for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Every rank: the manifest in torch's words."""
        return Metadata({name: _in_torchs_words(self._manifest.tensors[name]) for name in self._names})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Every rank: tell how much of each file it needs."""
        elements: dict[str, int] = defaultdict(int)
        for item in plan.items:
            elements[self._chunk(item).file] += math.prod(item.lengths)
        return replace(plan, storage_data=Needs(socket.gethostname(), dict(elements)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Rank 0: share out who checks which file."""
        shelf = [name for name in self._manifest.files if name.endswith(".safetensors")]
        checks = who_checks(shelf, [plan.storage_data for plan in plans])
        return [replace(plan, storage_data=names) for plan, names in zip(plans, checks, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every rank: read what it needs and check what it is to check; all damage at once."""
        wanted: dict[str, dict[str, Wanted]] = defaultdict(dict)
        for item in plan.items:
            chunk = self._chunk(item)
            dtype = self._manifest.tensors[item.storage_index.fqn].dtype
            want = wanted[chunk.file].setdefault(chunk.key, Wanted(dtype, chunk.size, []))
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            want.requests.append(Request(box, planner.resolve_tensor(item).detach()))
        problems: list[Problem] = []
        for name in sorted({*wanted, *plan.storage_data}):
            check = name in plan.storage_data
            try:
                read_shard(self._folder / name, self._manifest.files[name], wanted[name], check=check)
            except DataError as error:
                problems += error.problems
        if problems:
            raise DataError(problems)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, item: ReadItem) -> Chunk:
        index = item.storage_index
        assert index.index is not None, "torch's planner tells the place of a chunk in the list"
        chunk = self._manifest.tensors[index.fqn].chunks[index.index]
        assert index.offset is not None and chunk.offset == tuple(index.offset), (
            f"another chunk of {index.fqn}"
        )
        return chunk


def who_checks(files: Collection[str], needs: list[Needs]) -> list[list[str]]:
    """For each rank the files it is to check: on each machine every file that a rank there reads, once; all, somewhere.

    A file goes to the rank that needs most of it, among equals to the one with the fewest files so far.
    """
    checks: list[list[str]] = [[] for _ in needs]
    for number, machine in enumerate(dict.fromkeys(need.machine for need in needs)):
        ranks = [rank for rank, need in enumerate(needs) if need.machine == machine]
        for name in sorted(files):
            read_here = any(name in needs[rank].elements for rank in ranks)
            read_anywhere = any(name in need.elements for need in needs)
            if read_here or (number == 0 and not read_anywhere):
                best = min(ranks, key=lambda rank: (-needs[rank].elements.get(name, 0), len(checks[rank])))
                checks[best].append(name)
    return checks


def _in_torchs_words(record: TensorRecord) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, record.dtype)),
        size=torch.Size(record.shape),
        chunks=[ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.size)) for one in record.chunks],
    )
