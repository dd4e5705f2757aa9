"""The drills: many kills, and many signals, at random instants, and the run that comes out is the undisturbed one.

The instants of a drill are drawn from SEED and printed (`pytest -m long -s tests/train/test_drill.py`). What a drawn
instant meets depends on the machine; what must hold there does not.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from fourfold.checkpoint.validate import validate
from fourfold.record.run_dir import RunDir
from tests.cli.test_train import FOURFOLD, finish
from tests.train.living import descendants, ended, kill, last, newest_step, phases, ranks_of, tell
from tests.train.slow_model import SETS
from tests.train.test_resume import same

pytestmark = pytest.mark.long

SEED = 20261117
KILLS = 30
SIGNALS = 20
STEPS = 200  # more than the drills can reach: every instant meets a living run
EVERY = 3
RUN = (
    f"run.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    "batch.global_batch=4",
    "run.log_every=2",
    "data.validation_fraction=0.2",
    "model.args.seconds=0.01",
)
TRAINING_S = {"step": 0.05, "save": 0.03, "validation": 0.05}  # the longest delay in such a phase
LONGEST_S = {"start": 1.0, "import": 1.5, "load": 0.5} | TRAINING_S


@dataclass(frozen=True)
class Instant:
    """Once a run is in `phase` (of a step that is `ahead` of the newest checkpoint), after `delay_s`, to `whom`."""

    phase: str
    ahead: int
    delay_s: float
    whom: str


def draw(rng: random.Random, phases_: list[str], whom: list[str]) -> Instant:
    phase = rng.choice(phases_)
    # Before there are ranks there is only the launcher.
    target = "launcher" if phase == "start" else rng.choice(whom)
    return Instant(phase, rng.randint(1, 3 * EVERY), round(rng.uniform(0, LONGEST_S[phase]), 4), target)


def go(run: Path, *sets: str) -> subprocess.Popen[str]:
    settings = (*SETS, f"run.dir={json.dumps(str(run))}", *RUN, *sets)
    flags = [word for setting in settings for word in ("--set", setting)]
    asked = [*FOURFOLD, "train", "tiny", "--nproc", "2", "--resume", "auto", *flags]
    return subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(instant: Instant, process: subprocess.Popen[str], run: Path, saved: int) -> list[int]:
    """Returns at that instant, with all processes of the run."""
    until = time.monotonic() + 90
    while not met(instant, process, run, saved):
        assert process.poll() is None, (instant, finish(process))
        assert time.monotonic() < until, instant
        time.sleep(0.001)
    time.sleep(instant.delay_s)
    assert process.poll() is None, (instant, finish(process))
    return [process.pid, *descendants(process.pid)]


def met(instant: Instant, process: subprocess.Popen[str], run: Path, saved: int) -> bool:
    if instant.phase == "start":
        return True
    ranks = ranks_of(process.pid)
    if instant.phase == "import" or len(ranks) < 2:
        return len(ranks) == 2
    where = phases(run).values()
    if instant.phase == "load":
        return any(step == 0 and phase != "start" for step, phase in where)
    training = [(step, phase) for step, phase in where if step >= saved + instant.ahead]
    return any(instant.phase in ("step", phase) for _, phase in training)


def where(process: subprocess.Popen[str], run: Path) -> str:
    """What the run is doing now, as its ranks tell it."""
    if not ranks_of(process.pid):
        return "the launcher's start"
    now = phases(run).values()
    return " and ".join(sorted({phase for _, phase in now})) if now else "imports"


def last_saved(run: Path) -> int:
    """The step of the last save that a rank has told of."""
    told = [event for rank in (0, 1) if (event := last(run, "saved", rank)) is not None]
    return max((int(str(event["step"])) for event in told), default=0)


def whole(run: Path) -> int:
    """Validates every byte of every checkpoint; returns how many there are."""
    folders = sorted(RunDir(run).checkpoints.glob("step-*"))
    assert not {str(folder): found for folder in folders if (found := validate(folder))}
    return len(folders)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    code, story = finish(go(run))
    assert code == 0, story
    return run


@pytest.mark.timeout(1800)
def test_kills_at_random_instants_lose_no_saved_step(tmp_path, undisturbed):
    run = tmp_path / "run"
    rng = random.Random(SEED)
    saved, began = 0, time.monotonic()
    tally: Counter[str] = Counter()
    for number in range(1, KILLS + 1):
        instant = draw(
            rng, ["start", "import", "load", "step", "step", "save", "save"], ["launcher", "rank 0", "rank 1"]
        )
        process = go(run, "data.workers=1")
        try:
            everyone = wait_for(instant, process, run, saved)
            place = where(process, run)
            victim = process.pid
            if instant.whom != "launcher":
                victim = ranks_of(process.pid)[int(instant.whom[-1])]
            tell([victim], signal.SIGKILL)
            code, story = ended(process, everyone)
        finally:
            kill(process)
        assert code == (-9 if instant.whom == "launcher" else 128 + 9), (instant, story)
        now = newest_step(run) if run.exists() else 0
        print(f"kill {number}: {instant}: in {place}; newest checkpoint {saved} -> {now}", flush=True)
        assert now >= max(saved, last_saved(run)), (instant, story)
        saved = now
        tally[place] += 1
    assert 0 < saved < STEPS
    code, story = finish(go(run))
    assert code == 0, story
    assert f"step-{saved:08d}" in story
    same(run, undisturbed)
    print(f"{KILLS} kills in {time.monotonic() - began:.0f} s: {dict(tally)}")


@pytest.mark.timeout(1800)
def test_signals_at_random_instants_each_leave_a_complete_checkpoint(tmp_path, undisturbed):
    run = tmp_path / "run"
    rng = random.Random(SEED)
    sets = ("data.workers=2", "run.validate_every=4")
    saved, complete, began = 0, 0, time.monotonic()
    tally: Counter[str] = Counter()
    for number in range(1, SIGNALS + 1):
        instant = draw(
            rng, ["import", "load", "step", "step", "save", "validation"], ["launcher", "everyone"]
        )
        process = go(run, *sets)
        try:
            everyone = wait_for(instant, process, run, saved)
            place = where(process, run)
            tell(everyone[:1] if instant.whom == "launcher" else everyone, signal.SIGTERM)
            code, story = ended(process, [*everyone, *descendants(process.pid)])
        finally:
            kill(process)
        now = newest_step(run)
        print(
            f"signal {number}: {instant}: in {place}; exit {code}, newest checkpoint {saved} -> {now}",
            flush=True,
        )
        assert code == 75, (instant, story)
        assert whole(run) > 0
        assert [last(run, "end", rank)["step"] for rank in (0, 1)] == [now, now]  # type: ignore[index]
        assert now >= saved
        complete += 1
        tally[place] += 1
        saved = now
    assert complete == SIGNALS
    assert 0 < saved < STEPS
    code, story = finish(go(run, *sets))
    assert code == 0, story
    same(run, undisturbed)
    print(f"{SIGNALS} signals in {time.monotonic() - began:.0f} s: {dict(tally)}")
