"""What a run writes down while it goes: events of every rank, metrics and the story of rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor

from fourfold.checkpoint.retention import execute, plan_prune
from fourfold.checkpoint.validate import read_manifest
from fourfold.data.batch import Batch
from fourfold.parallel.data_parallel import mixes_rows
from fourfold.plan.run_plan import RunPlan
from fourfold.record.rewind import keep_lines_until
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines
from fourfold.spec.errors import DataError
from fourfold.train.meter import Meter
from fourfold.train.setup import Training
from fourfold.train.step import LossPair, Totals
from fourfold.train.story import Story
from fourfold.train.validation import ValidationResult


class Recorder:
    """One writer for a rank's share of the run directory."""

    def __init__(self, training: Training, plan: RunPlan, run: RunDir) -> None:
        self._training = training
        self._plan = plan
        self._run = run
        self._rank = training.joined.rank.rank

    def __enter__(self) -> Recorder:
        if self._rank == 0 and self._plan.resume_from:
            # What was written after the checkpoint is written again, from it.
            keep_lines_until(self._run.metrics, read_manifest(Path(self._plan.resume_from)).step)
        self._events = JsonLines(self._run.events(self._rank))
        self._metrics = JsonLines(self._run.metrics) if self._rank == 0 else None
        self._story = Story(self._run.log, speaks=self._rank == 0)
        self._meter = Meter(self._metrics)
        self._event("census", 0, **self._training.census)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._story.close()
        try:
            if error is not None:
                self._event("failure", -1, error=f"{type(error).__name__}: {error}")
            self._events.close()
            if self._metrics is not None:
                self._metrics.close()
        except DataError:
            if error is None:  # a full disk must not hide what ended the run
                raise

    def started(self, first: int) -> None:
        """The census holds, the mock batch went through: step `first` (from 0) comes next."""
        training = self._training
        self._event(
            "start", first, pid=os.getpid(), world=training.joined.rank.world, device=str(training.device)
        )
        for note in (*self._plan.notes, *training.sources.notes, *_mixing(training)):
            self._story.say(f"note: {note}")
        per_epoch, world = training.schedule.steps_per_epoch, training.joined.rank.world
        self._story.say(
            f"{self._plan.steps} steps of {training.spec.batch.global_batch} samples on "
            f"{world} rank{'s' if world > 1 else ''}; epoch: {per_epoch} steps ({len(training.sources.train)} samples)"
        )
        if self._plan.resume_from:
            self._story.say(f"goes on after step {first}, from {self._plan.resume_from}")
        self._meter.restart_clock()

    def saved(self, step: int, folder: Path) -> None:
        """A checkpoint was published after `step` (from 0); older ones go as the Spec says."""
        self._event("saved", step + 1, checkpoint=folder.name)
        if self._rank == 0:
            keep = self._training.spec.checkpoint
            try:
                execute(plan_prune(folder.parent, keep.keep_last, keep.keep_every))
            except DataError as error:  # what cannot be removed costs room, not the run
                self._story.say(f"note: {error}")
        self._story.progress(f"step {step + 1}/{self._plan.steps}  saved {folder}")

    def step(
        self,
        step: int,
        batches: Sequence[Batch],
        pair: LossPair,
        norm: Tensor,
        rate: float,
        totals: Totals,
        saving: bool = False,
    ) -> None:
        """One finished step (from 0); every `run.log_every` steps, and before a save, the metrics are written."""
        ids = [sample for batch in batches for sample in batch.sample_ids.tolist()]
        self._event("step", step + 1, epoch=batches[0].epoch, sample_ids=ids)
        self._meter.add(step, batches, pair, norm, rate, totals)
        last = step + 1 == self._plan.steps or totals.stop or saving
        due = last or (step + 1) % self._training.spec.run.log_every == 0
        text = f"step {step + 1}/{self._plan.steps}"
        if due:
            line = self._meter.flush()
            assert line is not None
            unit = "tokens" if self._plan.tokens_per_step is not None else "vectors"
            text += (
                f"  loss {line['loss']:.4f}  norm {line['grad_norm']:.3f}  lr {line['lr']:.2e}"
                f"  {line['tokens_per_s']:,.0f} {unit}/s"
            )
        if due:
            self._story.progress(text)
        else:
            self._story.progress_if_silent(text)

    def validation(self, step: int, result: ValidationResult | None) -> None:
        """What the validation after `step` (from 0) gave."""
        if result is not None:
            self._meter.leave_out(result.seconds)
            values = {
                "validation_loss": result.loss,
                "validation_tokens": result.targets,
                "validation_samples": result.samples,
            }
            self._event("validation", step + 1, **values)
            if self._metrics is not None:
                self._metrics.write({"step": step + 1, "time": time.time(), **values})
            self._story.say(
                f"step {step + 1}/{self._plan.steps}  validation loss {result.loss:.4f}"
                f" over {result.samples:,} samples"
            )

    def ended(self, ending: Literal["finished", "stopped"], step: int) -> Literal["finished", "stopped"]:
        """The run ends in good order after `step` (from 0)."""
        self._event("end", step + 1, ending=ending)
        if ending == "stopped":
            self._story.say(f"stopped by a signal after step {step + 1}")
        return ending

    def _event(self, kind: str, step: int, **values: Any) -> None:
        self._events.write({"t": time.time(), "rank": self._rank, "step": step, "kind": kind, **values})


def _mixing(training: Training) -> tuple[str, ...]:
    names = mixes_rows(training.model)
    if not names:
        return ()
    return (
        f"{', '.join(names)} take statistics over one microbatch: the result depends on how the batch is cut "
        "(layer or group norms do not)",
    )
