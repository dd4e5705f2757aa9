"""The course of a run, read from the record that a launcher and its ranks leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.diagnose.history import history
from fourfold.launch.failure import FailureReport, report_path
from fourfold.record.lock import locked
from fourfold.record.reader import RunReader
from fourfold.record.run_dir import RunDir, claim
from fourfold.record.writer import JsonLines, write_json, write_request
from fourfold.spec.model import MlpSpec
from fourfold.spec.spec import Spec

RESTART = (
    "restart 1 of 1: rank 1 was killed by SIGKILL at step 6 (backward); goes on after step 4, from ckpt/4"
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = claim(tmp_path / "run")
    write_request(made, Spec(name="toy", model=MlpSpec(kind="mlp")), {}, "")
    return made


def launched(run: RunDir, number: int, kind: str, t: float, **more: Any) -> None:
    with JsonLines(run.attempts) as file:
        file.write({"t": t, "attempt": number, "kind": kind, **more})


def lived(
    run: RunDir, number: int, t: float, after: int, reached: int, *more: dict[str, Any], pid: int = 7
) -> None:
    with JsonLines(run.events(0)) as file:
        file.write({"t": t, "rank": 0, "step": 0, "kind": "joined", "attempt": number, "pid": pid})
        file.write({"t": t + 1, "rank": 0, "step": after, "kind": "start", "world": 2})
        for step in range(after + 1, reached + 1):
            file.write({"t": t + 1 + step - after, "rank": 0, "step": step, "kind": "step"})
        for event in more:
            file.write({"t": t + 2 + reached - after, "rank": 0, "step": reached, **event})


def saved(step: int) -> dict[str, Any]:
    return {"kind": "saved", "step": step, "checkpoint": f"step-{step:08d}", "seconds": 0.5}


def test_a_kill_a_restart_a_signal_and_a_start_by_hand(run: RunDir) -> None:
    launched(run, 0, "start", 100.0, pids=[7, 8])
    lived(run, 0, 102.0, 0, 5, saved(4))
    killed = [{"rank": 1, "kind": "killed", "step": 6, "phase": "backward"}]
    launched(run, 0, "end", 110.0, exit_code=137, failures=killed)
    path = report_path(run.path, 1)
    path.parent.mkdir(parents=True)
    write_json(
        path,
        FailureReport(
            rank=1, message="", exit_code=137, time=1.0, **{k: v for k, v in killed[0].items() if k != "rank"}
        ),
    )
    launched(run, 0, "restart", 110.1, told=RESTART)
    launched(run, 1, "start", 110.2, pids=[17, 18])
    lived(run, 1, 113.0, 4, 7, saved(6), saved(7), {"kind": "end", "ending": "stopped"}, pid=17)
    launched(run, 1, "end", 120.0, exit_code=75, signal="SIGTERM", failures=[])
    launched(run, 2, "start", 200.0, pids=[27, 28])
    lived(
        run,
        2,
        203.0,
        7,
        9,
        {"kind": "not_saved", "error": "no space"},
        {"kind": "end", "ending": "finished"},
        pid=27,
    )
    launched(run, 2, "end", 210.0, exit_code=0, failures=[])
    told = history(RunReader(run.path))
    first, second, third = told.attempts
    assert (first.ending, first.exit_code, first.after_step, first.reached) == ("failed", 137, 0, 5)
    assert first.why == "rank 1 was killed by SIGKILL at step 6 (backward)" and first.then == RESTART
    assert (second.ending, second.why, second.lost_s, second.steps_again) == (
        "stopped by a signal",
        "SIGTERM",
        4.0,
        1,
    )
    assert (third.ending, third.lost_s, third.steps_again) == ("finished", 84.0, 0)
    assert [(one.attempt, one.step) for one in told.saved] == [(0, 4), (1, 6), (1, 7)]
    assert [(one.step, one.error) for one in told.not_saved] == [(9, "no space")]
    assert (told.lost_s, told.steps_again) == (88.0, 1)


def test_a_run_that_goes_on_and_one_that_died_without_a_word(run: RunDir) -> None:
    launched(run, 0, "start", 100.0, pids=[7, 8])
    lived(run, 0, 102.0, 0, 5)
    with locked(run):
        assert history(RunReader(run.path)).attempts[0].ending == "going on"
    [attempt] = history(RunReader(run.path)).attempts
    assert (attempt.ending, attempt.reached, attempt.ended) == ("without a word", 5, 108.0)


def test_ranks_that_never_came_to_a_step(run: RunDir) -> None:
    launched(run, 0, "start", 100.0, pids=[7, 8])
    launched(
        run,
        0,
        "end",
        101.0,
        exit_code=1,
        failures=[{"rank": 0, "kind": "raised", "step": 0, "phase": "start"}],
    )
    launched(run, 0, "final", 101.0, told="not started again: 1 restart brought no checkpoint")
    launched(run, 1, "start", 150.0, pids=[17, 18])
    launched(run, 1, "end", 155.0, exit_code=143, signal="SIGTERM", failures=[])
    first, second = history(RunReader(run.path)).attempts
    assert (first.after_step, first.why) == (None, "rank 0 (raised) at step 0 (start)")
    assert first.then.startswith("not started again")
    assert (second.ending, second.why) == ("stopped by a signal", "SIGTERM, killed before it was saved")
    assert second.lost_s == 54.0


def test_under_torchrun_the_ranks_alone_tell(run: RunDir) -> None:
    lived(run, 0, 100.0, 0, 5, {"kind": "failure", "step": -1, "error": "ValueError: bad"})
    lived(run, 1, 120.0, 4, 6, {"kind": "end", "ending": "stopped"}, pid=9)
    lived(run, 0, 140.0, 6, 8, {"kind": "end", "ending": "finished"}, pid=11)
    told = history(RunReader(run.path)).attempts
    assert [(one.number, one.ending) for one in told] == [
        (0, "failed"), (1, "stopped by a signal"), (0, "finished"),
    ]  # fmt: skip
    assert told[0].why == "rank 0: ValueError: bad"
    assert [one.steps_again for one in told] == [0, 1, 0]


def test_what_was_passed_over_is_read_from_the_story_folded_or_not(run: RunDir) -> None:
    run.log.write_text(
        "passed over run/ckpt/step-00000004: manifest.json: it is long, and broken\n  into two lines\n"
        "goes on from run/ckpt/step-00000002\n"
        "restart 1 of 3: rank 0 failed; goes on after step 2, from ckpt/2 (passed over ckpt/6: a: b (c)) (passed over\n"
        "  ckpt/4: d)\n"
    )
    told = history(RunReader(run.path)).passed_over
    assert [(one.path, one.why) for one in told] == [
        ("run/ckpt/step-00000004", "manifest.json: it is long, and broken into two lines"),
        ("ckpt/6", "a: b (c)"),
        ("ckpt/4", "d"),
    ]


def test_a_run_that_wrote_nothing_yet(run: RunDir) -> None:
    told = history(RunReader(run.path))
    assert (told.attempts, told.saved, told.lost_s) == ((), (), 0)
