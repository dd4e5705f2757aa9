"""What each rank does in the resume exercise: the right way, and the mistakes as they are found in the wild.

The right way is the product's loop, save and load. The mistakes are savers that leave something out, or write it in
the wrong way, and one careless trainer that takes what it finds and goes on. The product has none of them.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from safetensors.numpy import save as as_bytes
from safetensors.torch import load_file
from torch import Tensor

from fourfold.checkpoint.choose import reason
from fourfold.checkpoint.manifest import MANIFEST, STATE, Chunk, FileRecord, Manifest
from fourfold.checkpoint.publish import SaveFacts
from fourfold.checkpoint.save import save
from fourfold.checkpoint.validate import read_manifest
from fourfold.collectives.sums import sum_floats
from fourfold.lab.resume_model import DRAWN_FROM
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines, write_text
from fourfold.spec.errors import DataError
from fourfold.train.loop import train, warm_up
from fourfold.train.saving import load_state
from fourfold.train.setup import Training, no_beat, open_training
from fourfold.train.state import tensors_of
from fourfold.train.step import accumulate, agree_totals, clip, update
from fourfold.train.streams import restore_streams
from fourfold.verify.here import joined_here

MARK = "latest"  # the file that names the newest checkpoint, where one is trusted
ONE_FILE = "rank00000.safetensors"  # where every rank writes
_SLOTS = ("exp_avg", "exp_avg_sq", "step")


def right(plan: RunPlan, run: Path) -> dict[int, str]:
    """Train as planned in the product's own loop; where each step's dropout was drawn from (see DRAWN_FROM).

    What it tells goes to the run's log.txt only. Collectives: those of `train`.
    """
    with redirect_stderr(StringIO()):
        train(plan, joined_here(), RunDir(run), StopRequest(), no_beat)
    return dict(DRAWN_FROM)


def careless(plan: RunPlan, run: Path, folder: Path, saved: int, epoch_anew: bool) -> dict[int, str]:
    """A trainer as it is found in the wild: takes what it finds in the folder's files, checks nothing, goes on.

    saved: the step it goes on after. epoch_anew: it does not know where in the data it was. Its losses and sample ids
    go into the run's record. Collectives: those of the trainer's step. Returns as `right`.
    """
    rank = dist.get_rank()
    with (
        open_training(plan.spec, joined_here()) as training,
        JsonLines(RunDir(run).events(rank)) as events,
        JsonLines(RunDir(run).metrics) if rank == 0 else nullcontext() as metrics,
    ):
        warm_up(training)
        take_what_is_there(training, read_unchecked(folder))
        begin = 0 if epoch_anew else saved
        batches = training.loader.steps(begin, begin + plan.steps - saved)
        for step, microbatches in enumerate(batches, start=saved):
            pair, totals = accumulate(training, microbatches, agree_totals(training, microbatches, False))
            norm = clip(training)
            rate = update(training, step)
            loss = float(sum_floats(pair.sum)) / totals.count
            ids = [sample for batch in microbatches for sample in batch.sample_ids.tolist()]
            events.write({"rank": rank, "step": step + 1, "kind": "step", "sample_ids": ids})
            if metrics is not None:
                metrics.write({"step": step + 1, "loss": loss, "grad_norm": float(norm), "lr": rate})
        events.write({"rank": rank, "step": plan.steps, "kind": "end", "ending": "finished"})
    return dict(DRAWN_FROM)


def read_unchecked(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every file there; no manifest is asked, no hash compared."""
    held: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held |= load_file(file)
    return held


@torch.no_grad()
def take_what_is_there(training: Training, held: Mapping[str, Tensor]) -> None:
    """Put back what was found; what was not stays as it is in a new process (`strict=False`)."""
    for name, tensor in (*training.model.named_parameters(), *training.model.named_buffers()):
        if f"model.{name}" in held:
            tensor.copy_(held[f"model.{name}"])
    for name in training.optimizer.trained:
        slots = {slot: held[key] for slot in _SLOTS if (key := f"optimizer.{name}.{slot}") in held}
        if slots:
            training.optimizer.set_state(name, slots)
    own = f"rank{dist.get_rank()}."
    streams = {}
    # Its own last, so that they win; where there are none, another rank's streams are streams, too.
    for name in sorted(held, key=lambda name: name.startswith(own)):
        if name.startswith("rank"):
            streams[own + name.partition(".")[2]] = held[name]
    if streams:
        restore_streams(dist.get_rank(), streams)


def refused(plan: RunPlan, folder: Path) -> str:
    """Why the product's own load does not take a checkpoint, in one line; "" if it does.

    Collectives: those of `load_state`.
    """
    with open_training(plan.spec, joined_here()) as training:
        try:
            load_state(training, folder)
        except DataError as error:
            return reason(error.problems)
    return ""


def save_in_part(
    plan: RunPlan, good: Path, ckpt_dir: Path, without: tuple[str, ...], position: int | None = None
) -> None:
    """Save the state of `good` again, with what nobody thought of left out.

    without: how the names of those tensors begin. position: in the data, in place of the right one.
    """
    with open_training(plan.spec, joined_here()) as training:
        load_state(training, good)
        held = {name: tensor for name, tensor in tensors_of(training).items() if not name.startswith(without)}
        facts = _facts(read_manifest(good))
        save(held, _state(good), ckpt_dir, facts if position is None else replace(facts, position=position))


def save_all_to_one_file(plan: RunPlan, good: Path, folder: Path) -> str:
    """Every rank writes its whole state to the same path, at the same time; returns the hash of what this rank wrote.

    Rank 0 writes the manifest, too: the hash that it computed while writing, and the tensors that both ranks named.
    """
    with open_training(plan.spec, joined_here()) as training:
        load_state(training, good)
        data = as_bytes({name: one.contiguous().numpy() for name, one in tensors_of(training).items()})
    digest = xxhash.xxh3_128_hexdigest(data)
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    (folder / ONE_FILE).write_bytes(data)
    dist.barrier()
    if dist.get_rank() == 0:
        _describe(folder, good, FileRecord(bytes=len(data), xxh3_128=digest))
    return digest


def save_mark_first(good: Path, ckpt_dir: Path) -> None:
    """The mark, then the shards into their final place; killed when half of a shard is written."""
    if dist.get_rank() == 0:
        (ckpt_dir / good.name).mkdir()
        (ckpt_dir / MARK).write_text(good.name)
    dist.barrier()
    shard = f"rank{dist.get_rank():05d}.safetensors"
    data = (good / shard).read_bytes()
    _die_after(len(data) // 2)
    (ckpt_dir / good.name / shard).write_bytes(data)


def save_and_die(plan: RunPlan, good: Path, ckpt_dir: Path) -> None:
    """The product's save of the same state, killed at the same place."""
    with open_training(plan.spec, joined_here()) as training:
        load_state(training, good)
        manifest = read_manifest(good)
        _die_after(manifest.files[f"rank{dist.get_rank():05d}.safetensors"].bytes // 2)
        save(tensors_of(training), _state(good), ckpt_dir, _facts(manifest))


def _die_after(size: int) -> None:
    """Let the kernel kill this process, without another instruction, when it writes beyond `size` bytes of a file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _describe(folder: Path, good: Path, record: FileRecord) -> None:
    """The manifest that a save would write whose ranks share one file."""
    manifest = read_manifest(good)
    tensors = {
        name: tensor.model_copy(
            update={
                "chunks": (
                    Chunk(file=ONE_FILE, key=name, offset=(0,) * len(tensor.shape), size=tensor.shape),
                )
            }
        )
        for name, tensor in manifest.tensors.items()
    }
    files = {ONE_FILE: record, STATE: manifest.files[STATE]}
    (folder / STATE).write_bytes((good / STATE).read_bytes())
    write_text(
        folder / MANIFEST, manifest.model_copy(update={"files": files, "tensors": tensors}).model_dump_json()
    )


def _facts(manifest: Manifest) -> SaveFacts:
    return SaveFacts(
        step=manifest.step,
        position=manifest.position,
        layout=manifest.layout,
        spec_hash=manifest.spec_hash,
        data_hash=manifest.data_hash,
    )


def _state(good: Path) -> dict[str, object]:
    state: dict[str, object] = json.loads((good / STATE).read_bytes())
    return state
