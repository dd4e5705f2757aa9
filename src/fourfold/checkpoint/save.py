"""Saving: every rank writes its part into a fresh folder, and one rename makes the folder a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, state_dict_saver

from fourfold.checkpoint.publish import SaveFacts, step_name
from fourfold.checkpoint.storage_writer import SafetensorsWriter
from fourfold.checkpoint.together import as_one, rank_here, world_here
from fourfold.collectives.sums import start_sum
from fourfold.spec.errors import DataError, FourfoldError

__all__ = ["NotSaved", "SaveFacts", "save"]


class NotSaved(DataError):
    """A checkpoint could not be written; every rank is told, and every earlier checkpoint is as it was."""


def save(
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    folder: Path | str,
    facts: SaveFacts,
    writing: Callable[[], None] = lambda: None,
) -> Path:
    """Save a checkpoint of all ranks into `folder`, which holds the checkpoints of a run; returns the new one's path.

    tensors: by name; a DTensor is saved in the boxes its ranks hold. A plain tensor that several ranks name is taken
        to be the same on all of them: one of them writes it. They must not change during the call.
    state: everything else, as JSON (text keys, finite numbers); rank 0's is saved.
    writing: called before each tensor that this rank writes.
    facts: rank 0's count. Every rank calls, with or without tensors of its own.
    Collectives: those of torch.distributed.checkpoint.save on the default group: gather, scatter, gather, broadcast
    of objects, and a small sum if it fails; none in a world of one. When it returns on any rank, everything is on disk,
    under its final name.
    Raises on every rank what any of them met, all at once: NotSaved for files (disk full, no permission, a step
    that is saved already), and the folder is as before. If a rank dies, the others get the collective's error;
    what they have written is then no checkpoint.
    """
    folder = Path(folder)
    asked = f"save the checkpoint of step {facts.step}: {folder}"
    writer = SafetensorsWriter(folder, state, facts, rank_here(), writing)
    # Large ones first: a replicated tensor goes to the rank that has least to write so far.
    ordered = dict(sorted(tensors.items(), key=lambda named: -named[1].nbytes))
    planner = default_planner.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with as_one(asked):
            state_dict_saver.save(ordered, storage_writer=writer, planner=planner, no_dist=world_here() == 1)
    except FourfoldError as error:
        writer.close()
        start_sum([0]).wait()  # no rank goes on, into a disk that is full, before the room was given back
        if isinstance(error, DataError):
            raise NotSaved(error.problems) from error
        raise
    finally:
        writer.close()
    return folder / step_name(facts.step)
