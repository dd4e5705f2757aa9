"""Which checkpoints may go: planned as a value, carried out as planned, and never below the newest whole one."""

from __future__ import annotations

import math
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from fourfold.checkpoint.choose import Choice, Saved, Shelf, look, newest_of, reason
from fourfold.checkpoint.hold import in_use
from fourfold.checkpoint.manifest import MANIFEST, REMOVING
from fourfold.checkpoint.publish import sync_folder
from fourfold.checkpoint.validate import validate
from fourfold.record.problems import unwritable
from fourfold.spec.errors import DataError, Problem, SpecError
from fourfold.spec.value import Value

Action = Literal["goes", "stays"]


class Kept(Value):
    """One folder of a ckpt folder: whether it goes or stays, and why. `step` is None where no manifest tells it."""

    path: str
    step: int | None
    bytes: int
    action: Action
    why: str


class PrunePlan(Value):
    """What pruning would do to each folder; `newest_valid` is the checkpoint all the rest is measured against."""

    ckpt_dir: str
    keep_last: int
    keep_every: int
    keep_every_s: float = 0.0
    newest_valid: str | None
    folders: tuple[Kept, ...] = Field(strict=False)

    @property
    def going(self) -> tuple[Kept, ...]:
        """The folders to remove, the oldest first."""
        return tuple(folder for folder in self.folders if folder.action == "goes")


def plan_prune(
    ckpt_dir: Path | str, keep_last: int, keep_every: int = 0, keep_every_s: float = 0.0
) -> PrunePlan:
    """What to remove so that three kinds stay: the `keep_last` newest, and those that the other two (0: off) keep.

    keep_every: steps that it divides. keep_every_s: of each span of so many seconds (the manifests' clock, counted
    from 1970) the checkpoint of the lowest step; it stays that one, whenever and however often this is asked.
    Steps are the manifests' own numbers. The newest valid checkpoint is checked with its hashes, older ones without.
    A damaged one neither counts nor goes. While there is no valid one nothing goes.
    Raises SpecError for numbers out of range, DataError for a folder that cannot be listed.
    """
    _check_numbers(keep_last, keep_every, keep_every_s)
    shelf = look(ckpt_dir)
    choice = newest_of(shelf)
    newest = choice.path
    written_last = max(shelf.saved, key=lambda saved: saved.manifest.created, default=None)
    damage = _damage(shelf, choice)
    # Newest first: of each span the lowest step is what is left.
    firsts = {_span(saved, keep_every_s): saved for saved in shelf.saved if saved.path not in damage}
    folders, count = [], 0
    for saved in shelf.saved:
        action: Action = "stays"
        if saved.path not in damage:
            count += 1
            why = _why_kept(saved.manifest.step, count, keep_last, keep_every)
            if not why and keep_every_s and saved is firsts[_span(saved, keep_every_s)]:
                why = f"the first of its {keep_every_s:g} s"
            if not why and saved is written_last:
                why = "it was written last"
            if not why:
                action, why = "goes", f"not among the newest {keep_last}"
        else:
            why = f"damaged: {damage[saved.path]}"
        folders.append(_entry(saved, action, why))
    folders += [_plain(path, "stays", why) for path, why in shelf.unreadable]
    folders += [_leftover(path, newest) for path in shelf.saving]
    cut_short: Action = "goes" if newest else "stays"
    folders += [_plain(path, cut_short, "a removal that was not finished") for path in shelf.removing]
    return PrunePlan(
        ckpt_dir=str(ckpt_dir),
        keep_last=keep_last,
        keep_every=keep_every,
        keep_every_s=keep_every_s,
        newest_valid=str(newest) if newest else None,
        folders=tuple(reversed(folders)),
    )


def execute(plan: PrunePlan) -> tuple[Path, ...]:
    """Remove what the plan says goes; returns what was removed.

    Each folder is renamed first: a removal cut short leaves nothing that looks like a checkpoint. A save that has
    come to life since, and a folder that has gone already, are left alone.
    Raises DataError if the newest valid checkpoint of the plan is whole no longer (nothing is removed then), or if a
    folder cannot be removed.
    """
    removed = []
    if plan.going:
        _check_newest(plan)
    for folder in plan.going:
        path = Path(folder.path)
        if folder.step is None and not path.name.startswith(REMOVING) and in_use(path):
            continue
        try:
            if _remove(path):
                removed.append(path)
        except OSError as error:
            kept = f"{len(removed)} of {len(plan.going)} folders were removed; the rest is whole"
            raise unwritable(path, error, "remove the checkpoint", kept) from error
    return tuple(removed)


def _damage(shelf: Shelf, choice: Choice) -> dict[Path, str]:
    """What is wrong with each checkpoint that is not whole: the newest were checked already, down to the choice."""
    saved = {one.path for one in shelf.saved}
    damage = {path: why for path, why in choice.passed_over if path in saved}
    for path in saved - damage.keys() - {choice.path}:
        if problems := validate(path, hashes=False):
            damage[path] = reason(problems)
    return damage


def _why_kept(step: int, count: int, keep_last: int, keep_every: int) -> str:
    """count: how many valid ones have no lower step. Empty: by these two numbers it need not stay."""
    if count == 1:
        return "the newest valid one"
    if count <= keep_last:
        return f"among the newest {keep_last}"
    if keep_every and step % keep_every == 0:
        return f"step {step} is a multiple of {keep_every}"
    return ""


def _span(saved: Saved, seconds: float) -> float:
    """The number of the span of so many seconds, counted from 1970, that it was saved in."""
    return saved.manifest.created // seconds if seconds else 0.0


def _leftover(path: Path, newest: Path | None) -> Kept:
    """What is left of a save: it goes if its save is dead, and a newer checkpoint is whole."""
    if newest is None:
        return _plain(path, "stays", "no checkpoint here is valid")
    if in_use(path):
        return _plain(path, "stays", "a save is at work in it")
    try:
        changed = max(os.lstat(one).st_mtime_ns for one in (path, *path.iterdir()))
        newer = os.stat(newest / MANIFEST).st_mtime_ns
    except OSError as error:
        return _plain(path, "stays", error.strerror or str(error))
    if changed >= newer:
        return _plain(path, "stays", "a save newer than every valid checkpoint")
    return _plain(path, "goes", "a save that was not finished, older than the newest valid one")


def _check_newest(plan: PrunePlan) -> None:
    newest = Path(plan.newest_valid or "")
    problems = validate(newest, hashes=False)
    if problems:
        raise DataError(
            Problem(
                asked=f"prune {plan.ckpt_dir}, down to {newest.name}",
                found=reason(problems),
                why="it was whole when this was planned; without it an older one may be the last",
                instead=f"fourfold ckpt prune {plan.ckpt_dir} --keep-last {plan.keep_last} --dry-run",
            )
        )


def _remove(path: Path) -> bool:
    """Rename, make that last, then remove; False if the folder was gone already."""
    going = path
    if not path.name.startswith(REMOVING):
        going = path.with_name(f"{REMOVING}{path.name.lstrip('.')}-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(path, going)
        except FileNotFoundError:
            return False
        sync_folder(path.parent)
    while os.path.lexists(going):  # another removal may be at work in it: what is gone is gone
        with suppress(FileNotFoundError):
            shutil.rmtree(going)
    return True


def _entry(saved: Saved, action: Action, why: str) -> Kept:
    size = saved.manifest.total_bytes
    return Kept(path=str(saved.path), step=saved.manifest.step, bytes=size, action=action, why=why)


def _plain(path: Path, action: Action, why: str) -> Kept:
    return Kept(path=str(path), step=None, bytes=sum(_sizes(path)), action=action, why=why)


def _sizes(path: Path) -> Iterator[int]:
    """Of all that lies in a folder; what vanishes meanwhile is left out."""
    for folder, folders, files in os.walk(path) if not path.is_symlink() else ():
        for child in (*folders, *files):
            with suppress(OSError):
                yield os.lstat(os.path.join(folder, child)).st_size


def _check_numbers(keep_last: int, keep_every: int, keep_every_s: float) -> None:
    problems = []
    if keep_last < 1:
        why = "the newest valid checkpoint always stays"
        problems.append(Problem(f"keep {keep_last} checkpoints", "fewer than one", why, "--keep-last 1"))
    if keep_every < 0:
        why = "steps are counted upwards; 0 keeps none but the newest"
        problems.append(Problem(f"keep every {keep_every} steps", "a negative number", why, "--keep-every 0"))
    if not 0 <= keep_every_s < math.inf:
        why = "it is a length of time; 0 keeps none for its time"
        problems.append(
            Problem(f"keep one every {keep_every_s:g} s", "no such time", why, "--keep-every-s 3600")
        )
    if problems:
        raise SpecError(problems)
