"""When a run is saved, and what becomes of it if that fails."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fourfold.checkpoint.retention import execute, plan_prune
from fourfold.checkpoint.save import NotSaved
from fourfold.checkpoint.together import gather_json
from fourfold.data.batch import Batch
from fourfold.record.rewind import START, Mark
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import DataError, Problem
from fourfold.train.recorder import Recorder
from fourfold.train.saving import load_state, save_state
from fourfold.train.setup import Training
from fourfold.train.step import Totals


class Saver:
    """Keeps the state of a run on disk, as `[checkpoint]` asks; every rank has one, and all do the same.

    Saved is after `every` steps or `every_s` seconds, after the last step of a run that saves at all, and before a
    stop. A save that fails ends the run, and the last good checkpoint stays; with `on_error = "go_on"` the run goes on
    to the next save that is due, but for a save without which it would end unsaved.
    """

    def __init__(self, training: Training, run: RunDir, record: Recorder) -> None:
        self._training = training
        self._run = run
        self._record = record
        self._asked = training.spec.checkpoint
        self._saved = -1  # the newest step (from 0) whose state is on disk
        self._since = time.monotonic()

    def restore(self, folder: str | None) -> int:
        """Put back the checkpoint to go on from, if there is one; returns the step (from 0) that comes next.

        Collectives, and what is raised: those of `load_state`; DataError too for a record that does not belong to it.
        """
        if folder is None:
            return 0
        restored = load_state(self._training, Path(folder))
        self._record.restored(restored)
        self._saved = restored.step - 1
        return restored.step

    def time_is_up(self) -> bool:
        """Whether `every_s` have passed since the last save: only rank 0's clock counts, told with the totals."""
        every_s, rank = self._asked.every_s, self._training.joined.rank.rank
        return every_s > 0 and rank == 0 and time.monotonic() - self._since >= every_s

    def is_due(self, step: int, totals: Totals) -> bool:
        """Whether the state after `step` (from 0) is to be saved; the same on every rank."""
        every = self._asked.every
        last = step + 1 == self._training.spec.run.steps and (every > 0 or self._asked.every_s > 0)
        return totals.stop or totals.save or last or (every > 0 and (step + 1) % every == 0)

    def save(self, step: int, batches: Sequence[Batch], stopping: bool) -> None:
        """Save the state after `step` (from 0), unless it is saved; then remove what need not be kept.

        stopping: the run ends here. Collectives: those of `save_state` and of the metrics, and two small all-gathers.
        Raises NotSaved on every rank if it fails and the run cannot go on without it.
        """
        if step == self._saved:
            return
        try:
            metrics = self._mark()
            begin = time.perf_counter()
            folder = save_state(self._training, self._run, step, batches, metrics)
        except NotSaved as error:
            last = step + 1 == self._training.spec.run.steps
            if stopping or last or self._asked.on_error == "stop":
                error.add_note(f"the run ends without a checkpoint of step {step + 1}")
                raise
            self._record.not_saved(step, error)
        else:
            self._saved = step
            self._record.saved(step, folder, time.perf_counter() - begin)
            self._prune(folder.parent)
        self._since = time.monotonic()

    def _mark(self) -> Mark:
        """The end of the record so far. Raises NotSaved on every rank if it cannot be put on disk on any.

        Collectives: those of `Recorder.mark`, and two small all-gathers.
        """
        mark = START
        problems: Sequence[Problem] = ()
        try:
            mark = self._record.mark()
        except DataError as error:
            problems = error.problems
        told = gather_json([[p.asked, p.found, p.why, p.instead, p.where] for p in problems])
        found = dict.fromkeys(Problem(*parts) for of_rank in told for parts in of_rank)
        if found:
            raise NotSaved(list(found))
        return mark

    def _prune(self, ckpt_dir: Path) -> None:
        if self._training.joined.rank.rank == 0:
            keep = self._asked
            try:
                execute(plan_prune(ckpt_dir, keep.keep_last, keep.keep_every, keep.keep_every_s))
            except OSError as error:  # a DataError too: what cannot be removed costs room, not the run
                self._record.note(f"not pruned: {error}")
