"""What the lives of a run leave in its directory, read after each of them: steps, samples, validations, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.checkpoint.manifest import MANIFEST, SAVING, Manifest
from fourfold.checkpoint.publish import step_name
from fourfold.record.reader import RunReader, read_json
from fourfold.record.run_dir import RunDir
from fourfold.record.writer import write_text
from fourfold.spec.errors import DataError
from fourfold.verify.resume_course import Scenario

Lines = Mapping[int, Mapping[str, Any]]  # of metrics, by step from 1


class Continuation(NamedTuple):
    """A choice of a checkpoint. newest: the newest published step; chosen: the step of what was taken, and `folder`."""

    newest: int
    chosen: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Life:
    """What one set of processes did. first: steps that were done before; ids: of each rank, sample ids by step."""

    first: int
    ids: tuple[Mapping[int, Sequence[int]], ...]
    steps: Lines
    validations: Lines


@dataclass(slots=True)
class Trail:
    """A run through all its lives. ended: how each life ended; failure: what went otherwise than planned, "" if
    nothing did; aside: an unfinished save that was laid beside its checkpoints."""

    scenario: Scenario
    run: RunDir
    lives: list[Life] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    failure: str = ""
    aside: Path | None = None

    def life_that_saved(self, step: int) -> int:
        """The number of the life whose checkpoint of `step` is the one that lies there."""
        return max((number for number, life in enumerate(self.lives) if life.first < step), default=0)


def count_events(run: RunDir, world: int) -> list[int]:
    """Lines of each rank's events so far."""
    reader = RunReader(run.path)
    there = reader.ranks()
    return [sum(1 for _ in reader.events(rank)) if rank in there else 0 for rank in range(world)]


def read_life(run: RunDir, before: Sequence[int], first: int) -> Life:
    """The life that began after `before` lines of each rank's events, with step first + 1."""
    reader = RunReader(run.path)
    there = reader.ranks()
    ids = []
    for rank, skipped in enumerate(before):
        events = list(reader.events(rank))[skipped:] if rank in there else []
        ids.append({event["step"]: event["sample_ids"] for event in events if event["kind"] == "step"})
    lines = [line for line in reader.metrics() if line["step"] >= first]
    return Life(
        first,
        tuple(ids),
        {line["step"]: line for line in lines if "loss" in line and line["step"] > first},
        {line["step"]: line for line in lines if "validation_loss" in line},
    )


def written(run: RunDir) -> list[str]:
    """The lines of the metrics, each as what it tells of: "step 3" or "validation 3"."""
    return [
        f"{'step' if 'loss' in line else 'validation'} {line['step']}"
        for line in RunReader(run.path).metrics()
    ]


def published(run: RunDir) -> dict[int, Path]:
    """The checkpoints by the step in their manifest: every folder under a final name that has one that can be read."""
    found = {}
    for folder in sorted(run.checkpoints.iterdir()) if run.checkpoints.is_dir() else ():
        with suppress(DataError, KeyError):
            if not folder.name.startswith("."):
                found[int(read_json(folder / MANIFEST)["step"])] = folder
    return found


def leftovers(run: RunDir) -> list[str]:
    """What lies beside the checkpoints: saves and removals that were not finished, and all else that is none."""
    folders = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    whole = set(published(run).values())
    return sorted(folder.name for folder in folders if folder not in whole)


def lay_unfinished_save(run: RunDir) -> Path:
    """Beside the checkpoints, a save that lacks only its last act, the rename: whole, and two steps newer than any."""
    newest, folder = max(published(run).items())
    aside = folder.with_name(f"{SAVING}{step_name(newest + 2)}-unfinished")
    aside.mkdir()
    for file in folder.iterdir():
        (aside / file.name).write_bytes(file.read_bytes())
    manifest = Manifest.model_validate(read_json(folder / MANIFEST))
    later = manifest.model_copy(update={"step": newest + 2, "created": manifest.created + 1.0})
    write_text(aside / MANIFEST, later.model_dump_json() + "\n")
    return aside
