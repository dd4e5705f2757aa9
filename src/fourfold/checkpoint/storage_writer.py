"""torch's distributed checkpointing, writing side: its planner decides which rank writes what, this is the storage.

Tensors only, one safetensors file per rank. The folder's name travels with the plans, the files' hashes with the
results: a save needs no collective beside those of torch itself, and an error of one rank reaches all through them.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fourfold import __version__
from fourfold.checkpoint.header import DTYPES
from fourfold.checkpoint.hold import holding
from fourfold.checkpoint.manifest import Chunk, FileRecord, TensorRecord
from fourfold.checkpoint.publish import SaveFacts, begin, discard, publish
from fourfold.checkpoint.shard_file import Outgoing, write_shard
from fourfold.spec.errors import FourfoldError, Problem


class SafetensorsWriter(StorageWriter):
    """One save into `ckpt_dir`; torch calls its methods in the order in which they stand here."""

    def __init__(
        self,
        ckpt_dir: Path,
        state: Mapping[str, Any],
        facts: SaveFacts,
        rank: int,
        writing: Callable[[], None] = lambda: None,
    ) -> None:
        """`state` and `facts` count on rank 0 alone. writing: called before each tensor of this rank is written."""
        self._writing = writing
        self._ckpt_dir = ckpt_dir
        self._state = state
        self._facts = facts
        self._rank = rank
        self._text = ""
        self._world = 1
        self._folder: Path | None = None  # on rank 0, from its beginning until it is a checkpoint
        self._held = ExitStack()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """No id is taken: the folder is given to the constructor."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer is for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Every rank: refuse what is no tensor (torch would pickle it) or of a dtype without a name in the file."""
        problems = [problem for item in plan.items if (problem := _refused(item))]
        if problems:
            raise FourfoldError(problems)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0: make the folder, and tell every rank of it."""
        self._text = json.dumps(self._state, allow_nan=False)
        self._world = len(plans)
        self._folder = begin(self._ckpt_dir, self._facts.step)
        self._hold(self._folder)
        return [replace(plan, storage_data=self._folder.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Every rank: write its file. Its record comes last among the results; a rank without tensors has no file."""
        folder = self._ckpt_dir / plan.storage_data
        items = [item for item in plan.items if _holds_something(item)]
        results: list[WriteResult] = []
        if items:
            path = folder / f"rank{self._rank:05d}.safetensors"
            if self._folder is None:
                self._hold(folder)
            record = write_shard(path, [_outgoing(item, planner, self._writing) for item in items])
            results = [WriteResult(item.index, 0, _chunk(path.name, item)) for item in items]
            results.append(WriteResult(MetadataIndex(path.name), record.bytes, record))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0, when every file is on disk: write the manifest and publish."""
        assert self._folder is not None, "finish before prepare_global_plan"
        files: dict[str, FileRecord] = {}
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, FileRecord):
                files[result.index.fqn] = result.storage_data
            else:
                chunks[result.index.fqn].append(result.storage_data)
        tensors = {
            name: _tensor_record(metadata.state_dict_metadata[name], chunks[name]) for name in sorted(chunks)
        }
        publish(self._folder, self._facts, self._text, _versions(), self._world, files, tensors)
        self._folder = None

    def close(self) -> None:
        """Every rank, after the save: let go of the folder; rank 0 removes it if it is no checkpoint by now."""
        if self._folder is not None:
            discard(self._folder)
            self._folder = None
        self._held.close()

    def _hold(self, folder: Path) -> None:
        with suppress(OSError):  # a file system without locks: nobody can tell, so nobody removes it
            self._held.enter_context(holding(folder))


def _refused(item: WriteItem) -> Problem | None:
    name = item.index.fqn
    if item.tensor_data is None:
        return Problem(
            f"save {name}",
            "no tensor",
            "a checkpoint holds tensors; all else is in its state",
            f"state[{name!r}]",
        )
    dtype = _dtype_name(item.tensor_data.properties.dtype)
    if dtype not in DTYPES:
        return Problem(f"save {name}", f"dtype {dtype}", "safetensors has no such dtype", "another dtype")
    return None


def _holds_something(item: WriteItem) -> bool:
    """Not so for the empty shard of a tensor that is cut in more parts than it has rows."""
    assert item.tensor_data, "prepare_local_plan lets only tensors pass"
    return math.prod(item.tensor_data.chunk.sizes) > 0 or math.prod(item.tensor_data.size) == 0


def _outgoing(item: WriteItem, planner: SavePlanner, writing: Callable[[], None]) -> Outgoing:
    assert item.tensor_data, "prepare_local_plan lets only tensors pass"
    dtype = _dtype_name(item.tensor_data.properties.dtype)

    def resolve() -> torch.Tensor:
        writing()
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor), "prepare_local_plan lets only tensors pass"
        return tensor

    return Outgoing(item.index.fqn, dtype, tuple(item.tensor_data.chunk.sizes), resolve)


def _chunk(file: str, item: WriteItem) -> Chunk:
    """A rank holds one box of a tensor at most, so the tensor's name is a key of its own in the rank's file."""
    assert item.tensor_data, "prepare_local_plan lets only tensors pass"
    box = item.tensor_data.chunk
    return Chunk(file=file, key=item.index.fqn, offset=tuple(box.offsets), size=tuple(box.sizes))


def _tensor_record(told: Any, chunks: list[Chunk]) -> TensorRecord:
    assert isinstance(told, TensorStorageMetadata), "prepare_local_plan lets only tensors pass"
    dtype = _dtype_name(told.properties.dtype)
    return TensorRecord(dtype=dtype, shape=tuple(told.size), chunks=tuple(chunks))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _versions() -> Mapping[str, str]:
    return {"fourfold": __version__, "torch": torch.__version__, "python": platform.python_version()}
