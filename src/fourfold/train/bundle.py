"""A failure bundle: what one rank needs to run its failing step again, on one device, later.

A folder `failures/step-000005-rank1/` with `bundle.json` (Spec, step, error, random counters, versions, sample
ids) and `tensors.safetensors` (the step's microbatches, parameters and buffers before the step). Where the layout cuts
parameters it holds this rank's boxes of them, for it may ask no other rank for more: that can be looked at, but not
run again.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.data.batch import Batch
from fourfold.launch.failure import is_secondary
from fourfold.models.boxes import box_of
from fourfold.parallel.clip import local
from fourfold.record.environment import environment
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import write_json
from fourfold.train.census import named_state
from fourfold.train.setup import Training

SCHEMA = "fourfold.bundle/1"


@contextmanager
def keeping_bundle(training: Training, run: RunDir, step: int, batches: Sequence[Batch]) -> Iterator[None]:
    """Around a step: an exception that is this rank's own leaves a bundle behind, and goes on."""
    try:
        yield
    except Exception as error:
        if not is_secondary(error):
            try:
                folder = keep_bundle(training, run, step, batches, error)
                error.add_note(f"failure bundle: {folder}\n  type: fourfold replay {folder}")
            except (OSError, SafetensorError) as second:  # a full disk must not hide what ended the run
                error.add_note(f"no failure bundle could be kept: {second}")
        raise


def keep_bundle(
    training: Training, run: RunDir, step: int, batches: Sequence[Batch], error: BaseException
) -> Path:
    """Write the bundle of `step` (from 0). No collectives: other ranks may be gone."""
    rank = training.joined.rank.rank
    folder = run.failures_dir / f"step-{step + 1:06d}-rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    # Tied tensors share storage, which safetensors refuses: each name gets a copy of its own.
    for name, value in named_state(training.model).items():
        tensors[f"model.{name}"] = local(value).cpu().clone().contiguous()
    for index, batch in enumerate(batches):
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor):
                tensors[f"batch.{index}.{field.name}"] = value.detach().cpu().contiguous()
    save_file(tensors, folder / "tensors.safetensors")
    write_json(folder / "bundle.json", _description(training, step, batches, error))
    return folder


def _description(
    training: Training, step: int, batches: Sequence[Batch], error: BaseException
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "spec": training.spec.model_dump(mode="json"),
        "step": step + 1,
        "rank": training.joined.rank.rank,
        "world": training.joined.rank.world,
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        # Every random number is a function of these two, a name and a logical index.
        "random_counters": {"seed": training.spec.run.seed, "step": step},
        "loss_scale": training.scale.value,
        "degree": training.parallel.degree,
        # Offset and size of what the rank holds of each parameter that is cut
        "boxes": {
            name: [box.offset, box.size]
            for name, value in named_state(training.model).items()
            if isinstance(value, DTensor) and (box := box_of(value)).size != value.shape
        },
        # Which parameters are here, where other ranks have others
        "stage": sorted(training.named_parameters()) if training.parallel.pipeline is not None else None,
        "valid_targets": [batch.valid_count() for batch in batches],
        "microbatches": [
            {
                "sample_ids": batch.sample_ids.tolist(),
                "rows": batch.rows.tolist(),
                "epoch": batch.epoch,
                "processed": batch.processed,
                "nonpadding": batch.nonpadding,
                "seed": batch.seed,
                "step": batch.step,
            }
            for batch in batches
        ],
        "torch": torch.__version__,
        "environment": environment(),
    }
