from __future__ import annotations

import signal

import pytest
import torch
from torch.distributed import DistBackendError, DistStoreError

from fourfold.launch.failure import (
    End,
    FailureReport,
    describe,
    first_failure,
    in_order,
    is_secondary,
    read_reports,
    report_path,
    signal_name,
)
from fourfold.launch.pulse import Beat
from fourfold.record.writer import write_json
from fourfold.spec.errors import CheckFailed, Problem

CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9"
TIMED_OUT = (
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
)


def report(rank: int, kind: str, message: str = "", time: float = 10.0, exit_code: int = 1) -> FailureReport:
    return FailureReport.model_validate(
        {
            "rank": rank,
            "kind": kind,
            "step": 5,
            "phase": "forward",
            "message": message,
            "exit_code": exit_code,
            "time": time,
        }
    )


def end(
    rank: int, code: int | None, told: FailureReport | None = None, log: str = "", beat_at: float = 9.0
) -> End:
    return End(rank, code, 10.0, Beat(3, 5, "forward", beat_at, False), told, log)


def kinds(*ends: End, forwarded: int | None = None) -> list[tuple[int, str]]:
    return [(failure.rank, failure.kind) for failure in first_failure(ends, 4.0, forwarded)]


def test_good_ends_are_no_failure():
    assert kinds(end(0, 0), end(1, 0)) == []
    assert kinds(end(0, 75), end(1, 75)) == []


def test_a_killed_rank_comes_before_one_that_raised_and_both_before_who_lost_them():
    lost = end(0, 1, report(0, "collective", CLOSED, time=8.0))
    raised = end(1, 2, report(1, "raised", "mine", time=9.0))
    killed = end(2, -9)
    assert kinds(lost, raised, killed) == [(2, "killed"), (1, "raised"), (0, "collective")]
    first = first_failure([lost, raised, killed], 4.0)[0]
    assert first.exit_code == 137
    assert first.headline == "rank 2 was killed by SIGKILL at step 5 (forward)"


def test_of_two_that_raised_the_earlier_is_first():
    assert (
        kinds(end(0, 1, report(0, "raised", time=5.0)), end(1, 1, report(1, "raised", time=4.0)))[0][0] == 1
    )


def test_who_lives_when_the_others_timed_out_hung_the_longest_silent_first():
    lost = end(0, 1, report(0, "collective", TIMED_OUT))
    found = first_failure([lost, end(1, None, beat_at=8.0), end(2, None, beat_at=7.0)], 4.0)
    assert [(one.rank, one.kind) for one in found] == [(2, "hung"), (1, "hung"), (0, "collective")]
    assert found[0].exit_code == 137
    assert "3 s since its last sign of life" in found[0].message


def test_who_lives_when_another_was_killed_has_not_failed():
    assert kinds(end(0, None), end(1, -9)) == [(1, "killed")]


def test_who_reported_but_has_not_ended_yet_has_not_hung():
    assert kinds(end(0, None, report(0, "raised")), end(1, 1, report(1, "collective")))[0] == (0, "raised")


def test_who_came_too_late_hung():
    waited = end(0, 1, report(0, "collective", TIMED_OUT, time=8.0))
    late = end(1, 1, report(1, "collective", CLOSED, time=9.0))
    assert kinds(waited, late) == [(1, "hung"), (0, "collective")]
    both = end(1, 1, report(1, "collective", TIMED_OUT, time=9.0))
    assert kinds(waited, both) == [(0, "collective"), (1, "collective")]


def test_who_ended_well_while_others_waited_left():
    assert kinds(end(0, 1, report(0, "collective", CLOSED)), end(1, 0)) == [(1, "left"), (0, "collective")]


def test_finishing_while_another_stopped_is_a_disagreement():
    assert kinds(end(0, 75), end(1, 0)) == [(1, "disagreed")]
    assert kinds(end(0, 75), end(1, None)) == [(1, "hung")]


def test_a_rank_that_dies_of_the_forwarded_signal_has_not_failed():
    lost = end(0, 1, report(0, "collective", CLOSED))
    assert kinds(lost, end(1, -signal.SIGTERM), forwarded=signal.SIGTERM) == []
    assert kinds(lost, end(1, 128 + signal.SIGTERM), forwarded=signal.SIGTERM) == []
    assert kinds(lost, end(1, -signal.SIGTERM))[0] == (1, "killed")
    assert kinds(end(0, 2, report(0, "raised")), end(1, -2), forwarded=2) == [(0, "raised")]


def test_an_abort_after_the_timeout_is_the_watchdogs():
    assert kinds(end(0, -signal.SIGABRT, beat_at=5.0), end(1, None)) == [(1, "hung"), (0, "collective")]
    assert kinds(end(0, -signal.SIGABRT, beat_at=9.0), end(1, None)) == [(0, "killed")]


def test_without_a_report_the_log_speaks():
    (failure,) = first_failure([end(0, 7, log="Traceback\nKeyError: 'x'\n")], 4.0)
    assert (failure.kind, failure.exit_code) == ("raised", 7)
    assert "KeyError: 'x'" in failure.message
    assert kinds(end(0, 1, log=f"RuntimeError: {CLOSED}")) == [(0, "collective")]


def test_a_rank_without_a_pulse_was_before_step_1():
    (failure,) = first_failure([End(0, -9, 10.0)], 4.0)
    assert failure.headline == "rank 0 was killed by SIGKILL before its first step (start)"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(CLOSED), True),
        (RuntimeError(TIMED_OUT), True),
        (DistBackendError("NCCL error"), True),
        (DistStoreError("wait timeout"), True),
        (RuntimeError("DataLoader worker (pid 3) is killed by signal"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of a data server, say
        (ValueError("Timed out waiting"), False),
        (CheckFailed(Problem(CLOSED, "", "", "")), False),
    ],
)
def test_what_only_says_that_others_are_gone(error, expected):
    assert is_secondary(error) is expected


def test_an_error_of_ours_says_itself_that_it_only_follows():
    error = CheckFailed(Problem("loss", "nan on rank 1", "", ""))
    assert not is_secondary(error)
    error.secondary = True
    assert is_secondary(error)


def test_an_error_in_words_keeps_its_notes_and_drops_gloos_advice():
    error = ValueError("bad")
    error.add_note("failure bundle: here")
    assert describe(error) == "ValueError: bad\nfailure bundle: here"
    assert describe(
        RuntimeError(f"{CLOSED}. This is typically caused by a remote worker crashing.")
    ).endswith(":9.")
    assert describe(CheckFailed(Problem("asked", "found", "why", ""))).startswith("asked\n")
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(2, 3)(torch.ones(1, 5))
    assert f"at {__file__}:" in describe(raised.value), "the line that called torch"


def test_reports_round_trip_and_older_or_broken_ones_are_passed_over(tmp_path):
    (tmp_path / "failures").mkdir()
    new, old = report(0, "raised", time=20.0), report(1, "raised", time=5.0)
    for one in (new, old):
        write_json(report_path(tmp_path, one.rank), one)
    report_path(tmp_path, 2).write_text("{")
    assert read_reports(tmp_path, since=10.0) == {0: new}
    assert read_reports(tmp_path / "none", since=0.0) == {}


def test_each_attempts_reports_lie_by_themselves(tmp_path):
    for attempt in (0, 1):
        path = report_path(tmp_path, 0, attempt)
        path.parent.mkdir()
        write_json(path, report(0, "raised", time=20.0 + attempt))
    assert [read_reports(tmp_path, 0.0, attempt)[0].time for attempt in (0, 1)] == [20.0, 21.0]
    assert read_reports(tmp_path, 0.0, 2) == {}


def test_in_order_of_nothing_is_nothing():
    assert in_order([]) == ()


def test_signals_have_names_where_they_have_one():
    assert signal_name(9) == "SIGKILL"
    assert signal_name(99) == "signal 99"
