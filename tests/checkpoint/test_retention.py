"""Pruning: numeric, planned first, and never below the newest whole checkpoint."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.checkpoint import retention
from fourfold.checkpoint.choose import Choice, Shelf, newest_valid
from fourfold.checkpoint.hold import holding, in_use
from fourfold.checkpoint.manifest import MANIFEST, STATE
from fourfold.checkpoint.retention import PrunePlan, execute, plan_prune
from fourfold.checkpoint.validate import validate
from fourfold.spec.errors import DataError, SpecError
from tests.checkpoint.example import FILES, flip, leave_unfinished, truncate, write_checkpoint


def going(plan: PrunePlan) -> list[str]:
    return [Path(folder.path).name for folder in plan.going]


def why(plan: PrunePlan, folder: Path) -> str:
    """ "goes: ..." or "stays: ..." of one folder."""
    [entry] = [entry for entry in plan.folders if entry.path == str(folder)]
    return f"{entry.action}: {entry.why}"


def test_numbers_are_numbers(tmp_path: Path) -> None:
    """9900 sorts behind 10000 as text."""
    older, newest = write_checkpoint(tmp_path, 9900, "9900"), write_checkpoint(tmp_path, 10000, "10000")
    plan = plan_prune(tmp_path, 1)
    assert going(plan) == ["9900"] and plan.newest_valid == str(newest)
    assert execute(plan) == (older,)
    assert [path.name for path in tmp_path.iterdir()] == ["10000"]
    assert validate(newest) == []


def test_the_newest_and_every_so_many(tmp_path: Path) -> None:
    folders = {step: write_checkpoint(tmp_path, step) for step in (100, 150, 200, 250, 300, 350)}
    plan = plan_prune(tmp_path, 2, 100)
    assert going(plan) == ["step-00000150", "step-00000250"]
    assert why(plan, folders[350]) == "stays: the newest valid one"
    assert why(plan, folders[300]) == "stays: among the newest 2"
    assert why(plan, folders[200]) == "stays: step 200 is a multiple of 100"
    assert why(plan, folders[150]) == "goes: not among the newest 2"
    assert all(entry.bytes > 0 for entry in plan.folders)
    assert PrunePlan.model_validate_json(plan.model_dump_json()) == plan
    execute(plan)
    assert plan_prune(tmp_path, 2, 100).going == ()


def test_planning_changes_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    leave_unfinished(tmp_path, 2, age_s=1000)
    before = sorted(tmp_path.rglob("*"))
    plan = plan_prune(tmp_path, 1)
    assert len(plan.going) == 3 and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "manifest"])
def test_a_stale_damaged_one_of_a_higher_number_does_not_count(tmp_path: Path, damage: str) -> None:
    valid, older = write_checkpoint(tmp_path, 100), write_checkpoint(tmp_path, 50)
    stale = write_checkpoint(tmp_path, 9000)
    if damage == "flip":
        flip(stale / FILES[0], 8 * (stale / FILES[0]).stat().st_size - 1)  # only its hash tells
    else:
        truncate(stale / (FILES[0] if damage == "cut" else MANIFEST))
    plan = plan_prune(tmp_path, 1)
    assert plan.newest_valid == str(valid)
    assert going(plan) == [older.name]
    assert why(plan, stale).startswith("stays: " if damage == "manifest" else "stays: damaged: ")


def test_an_older_damaged_one_does_not_count_either(tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    truncate(folders[1] / FILES[0])
    plan = plan_prune(tmp_path, 2)
    assert plan.going == ()
    assert why(plan, folders[0]) == "stays: among the newest 2"


def test_without_a_valid_one_nothing_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        truncate(write_checkpoint(tmp_path, step) / FILES[0])
    leave_unfinished(tmp_path, 1, age_s=1000)
    write_checkpoint(tmp_path, 4, ".removing-step-00000004-abcd")
    plan = plan_prune(tmp_path, 1)
    assert plan.newest_valid is None and plan.going == () and len(plan.folders) == 5
    assert execute(plan) == ()
    assert plan_prune(tmp_path / "nowhere", 1).folders == ()


def test_what_was_written_last_stays(tmp_path: Path) -> None:
    """A run that went back to step 10 and was saved at 20, beside what an earlier one saved at 9000."""
    write_checkpoint(tmp_path, 9000, created=100.0)
    write_checkpoint(tmp_path, 10, created=50.0)
    written = write_checkpoint(tmp_path, 20, created=200.0)
    plan = plan_prune(tmp_path, 1)
    assert going(plan) == ["step-00000010"]
    assert why(plan, written) == "stays: it was written last"


def test_links_and_files_are_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    outside = write_checkpoint(tmp_path / "outside", 1)
    write_checkpoint(place, 10)
    (place / "step-00000001").symlink_to(outside)
    (place / "notes.txt").write_text("mine")
    (place / ".hidden").mkdir()
    assert plan_prune(place, 1).going == ()


def test_leftovers_of_dead_saves_go(tmp_path: Path) -> None:
    dead = leave_unfinished(tmp_path, 20, age_s=1000)
    newest = write_checkpoint(tmp_path, 20)
    young = leave_unfinished(tmp_path, 30)
    os.utime(newest / MANIFEST, (newest.stat().st_mtime - 500,) * 2)
    plan = plan_prune(tmp_path, 1)
    assert going(plan) == [dead.name]
    assert why(plan, young) == "stays: a save newer than every valid checkpoint"
    assert execute(plan) == (dead,)
    assert young.exists() and not dead.exists()


def test_a_save_at_work_is_left_alone(tmp_path: Path) -> None:
    saving = leave_unfinished(tmp_path, 20, age_s=1000)
    write_checkpoint(tmp_path, 10)
    dead = plan_prune(tmp_path, 1)
    assert going(dead) == [saving.name]
    with holding(saving), holding(saving):
        assert in_use(saving)
        assert why(plan_prune(tmp_path, 1), saving) == "stays: a save is at work in it"
        assert execute(dead) == ()  # it came to life after the plan was made
    assert not in_use(saving)
    assert execute(dead) == (saving,)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = """
import sys, time
from fourfold.checkpoint.hold import holding
with holding(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert in_use(tmp_path)
        process.kill()
        process.wait()
    assert not in_use(tmp_path)
    assert in_use(tmp_path / "nowhere")
    with pytest.raises(OSError, match="No such file"), holding(tmp_path / "nowhere"):
        pass


def test_a_removal_cut_short_leaves_no_checkpoint_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newest = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)

    def dying(path: Path) -> None:
        (Path(path) / FILES[0]).unlink()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dying)
        with pytest.raises(DataError, match="0 of 1 folders were removed"):
            execute(plan_prune(tmp_path, 1))
    assert not older.exists()
    [rest] = newest_valid(tmp_path).passed_over
    assert rest.path.name.startswith(".removing-step-00000010-")
    assert execute(plan_prune(tmp_path, 1)) == (rest.path,)
    assert list(tmp_path.iterdir()) == [newest]


def test_a_folder_that_has_gone_already(tmp_path: Path) -> None:
    older, _ = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    plan = plan_prune(tmp_path, 1)
    shutil.rmtree(older)
    assert execute(plan) == ()


def test_an_outdated_plan_is_refused(tmp_path: Path) -> None:
    older, newest = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    plan = plan_prune(tmp_path, 1)
    truncate(newest / FILES[0])
    with pytest.raises(DataError, match="older one may be the last"):
        execute(plan)
    assert validate(older) == []


@pytest.mark.parametrize(
    ("last", "every", "every_s"),
    [(0, 0, 0.0), (-1, 0, 0.0), (1, -1, 0.0), (1, 0, -1.0), (1, 0, math.nan), (1, 0, math.inf)],
)
def test_numbers_out_of_range(tmp_path: Path, last: int, every: int, every_s: float) -> None:
    with pytest.raises(SpecError) as error:
        plan_prune(tmp_path, last, every, every_s)
    assert len(error.value.problems) == 1
    with pytest.raises(SpecError) as error:
        plan_prune(tmp_path, 0, -1, -1.0)
    assert len(error.value.problems) == 3


def test_the_first_of_every_hour(tmp_path: Path) -> None:
    """Saved every 20 minutes from 10:10 on."""
    begin = 36_000.0 + 600.0
    folders = {step: write_checkpoint(tmp_path, step, created=begin + step * 1200.0) for step in range(8)}
    plan = plan_prune(tmp_path, 2, keep_every_s=3600.0)
    assert going(plan) == ["step-00000001", "step-00000002", "step-00000004", "step-00000005"]
    assert why(plan, folders[3]) == "stays: the first of its 3600 s"
    assert why(plan, folders[7]) == "stays: the newest valid one"
    execute(plan)
    assert plan_prune(tmp_path, 2, keep_every_s=3600.0).going == ()


def test_a_clock_that_went_back_keeps_what_it_kept(tmp_path: Path) -> None:
    """An hour is entered a second time: it has its checkpoint already."""
    clock = {10: 7300.0, 20: 7400.0, 30: 3700.0, 40: 7500.0, 50: 11000.0}
    for step, created in clock.items():
        write_checkpoint(tmp_path, step, created=created)
    assert going(plan_prune(tmp_path, 1, keep_every_s=3600.0)) == ["step-00000020", "step-00000040"]


@pytest.mark.parametrize("every_s", [5e-324, 1e-3, 1e300])
def test_any_length_of_time_is_one(tmp_path: Path, every_s: float) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    gone = 0 if every_s == 1e-3 else 1  # of two spans, of all time
    assert len(plan_prune(tmp_path, 1, keep_every_s=every_s).going) == gone


# Names as they are met: short ones sort otherwise than numbers do (9900 behind 10000).
STEPS = st.integers(0, 40) | st.sampled_from([9900, 9999, 10000, 10001])
TIMES = st.integers(0, 12).map(lambda hour: 1e6 + 600.0 * hour)  # in any order: clocks go backwards


@given(
    clock=st.dictionaries(STEPS, TIMES, min_size=1, max_size=5),
    last=st.integers(1, 4),
    every=st.sampled_from([0, 1, 3, 10]),
    every_s=st.sampled_from([0.0, 600.0, 1500.0, 1e9]),
    data=st.data(),
)
def test_what_is_left_is_what_should_be(
    tmp_path_factory: pytest.TempPathFactory,
    clock: dict[int, float],
    last: int,
    every: int,
    every_s: float,
    data: st.DataObject,
) -> None:
    place = tmp_path_factory.mktemp("ckpt")
    broken = data.draw(st.sets(st.sampled_from(sorted(clock))))
    for step, created in clock.items():
        folder = write_checkpoint(place, step, f"{step}", created)
        if step in broken:
            truncate(folder / FILES[0])
    valid = sorted(set(clock) - broken, reverse=True)
    wanted = set(valid[:last]) | {step for step in valid if every and step % every == 0} | broken
    if every_s:
        wanted |= {
            min(other for other in valid if clock[other] // every_s == clock[step] // every_s)
            for step in valid
        }
    newest_time = max(clock.values())
    written_last = max(step for step in clock if clock[step] == newest_time)
    execute(retention.plan_prune(place, last, every, every_s))
    left = {int(path.name) for path in place.iterdir()}
    assert wanted <= left <= wanted | {written_last}
    assert newest_valid(place).step == (valid[0] if valid else None)
    assert retention.plan_prune(place, last, every, every_s).going == ()
    if valid:  # stricter ever after: the newest valid one is all that must be left
        execute(retention.plan_prune(place, 1))
        assert newest_valid(place).step == valid[0]


@settings(max_examples=40)
@given(times=st.lists(TIMES, min_size=1, max_size=6), last=st.integers(1, 2), stale=st.booleans())
def test_pruned_after_every_save_each_span_keeps_its_first_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, times: list[float], last: int, stale: bool
) -> None:
    """As a run does it. stale: a damaged folder of a higher step, of an earlier run, lies there all the time."""
    place, every_s = tmp_path_factory.mktemp("ckpt"), 1500.0
    if stale:
        truncate(write_checkpoint(place, 10**6, created=0.0) / FILES[1])
    for step, created in enumerate(times):
        write_checkpoint(place, step, created=created)
        execute(plan_prune(place, last, 0, every_s))
        assert newest_valid(place).step == step
        spans: dict[float, int] = {}
        for saved in range(step + 1):
            spans.setdefault(times[saved] // every_s, saved)
        wanted = {*spans.values(), *range(max(0, step + 1 - last), step + 1)}
        left = {int(path.name.removeprefix("step-")) for path in place.iterdir()} - {10**6}
        # What was written last by a clock that went back later stays as long as it is that.
        assert wanted <= left <= wanted | {one for one in left if times[one] == max(times[: step + 1])}


def test_what_is_saved_or_removed_meanwhile_breaks_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look counts: a save that is published after it is in no plan, and a folder that is gone has no size."""
    older, newest = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    gone = write_checkpoint(tmp_path, 5, ".removing-step-00000005-abcd")
    nested = tmp_path / "no-checkpoint"
    (nested / "a").mkdir(parents=True)
    keep = retention.look

    def looked(ckpt_dir: Path | str) -> Shelf:
        shelf = keep(ckpt_dir)
        write_checkpoint(tmp_path, 30)
        shutil.rmtree(gone)
        shutil.rmtree(nested)
        return shelf

    monkeypatch.setattr(retention, "look", looked)
    plan = plan_prune(tmp_path, 1)
    assert plan.newest_valid == str(newest)
    assert going(plan) == [gone.name, older.name]
    assert why(plan, newest) == "stays: the newest valid one"
    assert len(plan.folders) == 4
    assert execute(plan) == (gone, older)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def test_a_damaged_one_that_is_mended_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, damaged = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    flip(damaged / STATE, 11)
    keep = retention.newest_of

    def chosen(shelf: Shelf) -> Choice:
        choice = keep(shelf)
        flip(damaged / STATE, 11)
        return choice

    monkeypatch.setattr(retention, "newest_of", chosen)
    plan = plan_prune(tmp_path, 1)
    assert plan.newest_valid == str(newest) and plan.going == ()
    assert why(plan, damaged).startswith(f"stays: damaged: {STATE}: its hash is ")
