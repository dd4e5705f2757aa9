"""What a run writes down while it goes: events of every rank, metrics and the story of rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor

from fourfold.checkpoint.save import NotSaved
from fourfold.data.batch import Batch
from fourfold.launch.stop import StopRequest
from fourfold.parallel.bytes import held
from fourfold.parallel.data_parallel import mixes_rows
from fourfold.plan.run_plan import RunPlan
from fourfold.plan.state_bytes import Instant
from fourfold.record.rewind import START, Mark, Marker
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import JsonLines
from fourfold.spec.errors import DataError
from fourfold.spec.words import counted
from fourfold.train.meter import Meter
from fourfold.train.precision import notes
from fourfold.train.saving import Restored
from fourfold.train.setup import Training
from fourfold.train.state import unsaved
from fourfold.train.step import LossPair, Totals
from fourfold.train.story import Story
from fourfold.train.validation import ValidationResult, batches_each

HOLD_BYTES = 2**24  # of each file's lines, kept in memory while the disk is full and the run may go on


class Recorder:
    """One writer for a rank's share of the run directory.

    With `checkpoint.on_error = "go_on"` a full disk does not end the run: events and metrics, which hold the sample
    ids, wait in memory until there is room; lines of the story may be lost.
    """

    def __init__(
        self, training: Training, plan: RunPlan, run: RunDir, stop: StopRequest | None = None
    ) -> None:
        """stop: this rank's request to stop; when what came of it is told at the end."""
        self._training = training
        self._plan = plan
        self._run = run
        self._rank = training.joined.rank.rank
        self._marker = Marker(run.metrics)
        self._stop = stop or StopRequest()
        self._stopping: list[str] = []  # what was done, how long after the signal
        self._slowest_s = training.spec.run.grace_s / 2  # a save may take so long without a word
        self._going = 1  # the step that goes on, from 1
        self._memory_until = 0  # up to this step, what is held is recorded
        self._beats = 0  # so far in this validation
        self._validation_batches = batches_each(training)

    def __enter__(self) -> Recorder:
        goes_on = self._training.spec.checkpoint.on_error == "go_on"
        hold_bytes = HOLD_BYTES if goes_on else 0
        self._events = JsonLines(self._run.events(self._rank), hold_bytes)
        self._metrics = JsonLines(self._run.metrics, hold_bytes) if self._rank == 0 else None
        self._story = Story(self._run.log, speaks=self._rank == 0, may_lose=goes_on)
        self._meter = Meter(self._metrics, self._training.parallel.counts)
        self._event("census", 0, **self._training.census)
        self._memory("after init", 0)
        self._training.between = lambda: self._memory("between microbatches", self._going)
        self._passed_on, self._training.beat = self._training.beat, self._beat
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
        self._going = first + 1
        self._memory_until = first + 2  # in a run's first step there are no moments before its end
        self._event(
            "start", first, pid=os.getpid(), world=training.joined.rank.world, device=str(training.device)
        )
        costs = notes(training.spec, training.parallel.degree, training.device)
        told = *self._plan.notes, *training.sources.notes, *costs, *_mixing(training), *_unsaved(training)
        for note in told:
            self.note(note)
        per_epoch, world = training.schedule.steps_per_epoch, training.joined.rank.world
        self._story.say(
            f"{counted(self._plan.steps, 'step')} of {counted(self._plan.samples_per_step, 'sample')} on "
            f"{counted(world, 'rank')}; epoch: {counted(per_epoch, 'step', ',')} "
            f"({counted(len(training.sources.train), 'sample', ',')})"
        )
        if self._plan.resume_from:
            self._story.say(f"goes on after step {first}, from {self._plan.resume_from}")
        self._meter.restart_clock()

    def restored(self, restored: Restored) -> None:
        """A checkpoint was put back: metrics after it are taken back, as they will be written again."""
        if self._metrics is not None and not self._marker.cut_back(restored.metrics):
            self.note(f"{self._run.metrics} is gone: it begins again after step {restored.step}")
        leave = restored.allowed
        if any(leave):
            self._event("allowed", restored.step, **leave._asdict())
            for names, said in (
                (leave.initial, "not in the checkpoint, and begins as in a new run"),
                (leave.left_out, "in the checkpoint, and left out"),
                (leave.unused, "matches no tensor that is missing or left over"),
            ):
                for name in names:
                    self.note(f"{name}: {said}")
        if leave.another_model:
            self.note("the last batch's loss was not held against the saved one: the model is another")

    def mark(self) -> Mark:
        """Write down every step so far, to disk; up to where the metrics belong to them (rank 0 has them).

        Collectives: those of `Meter.flush`.
        """
        self._meter.flush()
        self._events.flush()
        if self._metrics is None:
            return START
        self._metrics.flush()
        return self._marker.mark()

    def saved(self, step: int, folder: Path, seconds: float) -> None:
        """A checkpoint was published after `step` (from 0); it took so long."""
        self._meter.leave_out(seconds)
        self._event("saved", step + 1, checkpoint=folder.name, seconds=seconds)
        self._story.progress(f"step {step + 1}/{self._plan.steps}  saved {folder} in {seconds:.1f} s")
        if self._stop.requested:
            self._stopping.append(f"saved after {self._stop.waited_s:.1f} s")
        if seconds > self._slowest_s:
            self._slowest_s = 1.5 * seconds
            grace_s = self._training.spec.run.grace_s
            self.note(
                f"saving took {seconds:.1f} s. At a signal the last microbatches and the save must be done within "
                f"run.grace_s, which is {grace_s:g}, and within the grace of what starts this run (see docs/signals.md)"
            )

    def not_saved(self, step: int, error: NotSaved) -> None:
        """The state after `step` (from 0) could not be saved, and the run goes on."""
        self._event("not_saved", step + 1, error=str(error))
        self._story.say(f"step {step + 1}/{self._plan.steps}  not saved, and the run goes on:\n{error}")

    def note(self, text: str) -> None:
        """Something a person should know."""
        self._story.say(f"note: {text}")

    def step(
        self,
        step: int,
        batches: Sequence[Batch],
        pair: LossPair,
        norm: Tensor,
        rate: float,
        totals: Totals,
    ) -> None:
        """One finished step (from 0); every `run.log_every` steps the metrics are written."""
        ids = [sample for batch in batches for sample in batch.sample_ids.tolist()]
        self._event("step", step + 1, epoch=batches[0].epoch, sample_ids=ids)
        self._memory("after the step", step + 1)
        self._going = step + 2
        scale = self._training.scale
        self._meter.add(step, batches, pair, norm, rate, totals, scale.last if scale.dynamic else None)
        if scale.last.skipped:
            self._event("skipped", step + 1, scale=scale.last.scale, next=scale.value)
            self.note(
                f"step {step + 1} makes no update: a gradient overflowed under a loss scale of {scale.last.scale:g}; "
                f"it is {scale.value:g} now"
            )
        self._stopping = [f"the ranks agreed after {self._stop.waited_s:.1f} s"] if totals.stop else []
        last = step + 1 == self._plan.steps or totals.stop
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
            told = f"stopped by a signal after step {step + 1}"
            if self._stop.signal is not None:  # else another rank has it, and knows when it came
                told += "".join(f", {done}" for done in self._stopping)
                told += f"; run.grace_s gives {self._training.spec.run.grace_s:g} s to the end of every rank"
            self._story.say(told)
        return ending

    def _beat(self, step: int, phase: str, patient: bool = False) -> None:
        """A sign of life is passed on; what lasts, before the first step, in one or after it, is told, too."""
        self._passed_on(step, phase, patient)
        told = f"step {step}/{self._plan.steps}  {phase}" if step else f"before the first step: {phase}"
        if phase == "validation":
            self._beats += 1
            told += f": batch {self._beats} of {self._validation_batches}"
        else:
            self._beats = 0
        self._story.progress_if_silent(told)

    def _memory(self, instant: Instant, step: int) -> None:
        """What this rank holds by category, while that is asked for: bytes, beside those of the plan."""
        if step <= self._memory_until:
            training = self._training
            self._event(
                "memory", step, instant=instant, bytes=held(training.parallel, training.optimizer.tensors)
            )

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


def _unsaved(training: Training) -> tuple[str, ...]:
    names = unsaved(training)
    if not names:
        return ()
    return (
        f"{', '.join(names)} keep state that is no tensor (get_extra_state): a checkpoint does not hold it, so that a "
        "resumed run may be another (a buffer would be held)",
    )
