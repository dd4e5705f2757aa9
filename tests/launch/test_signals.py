"""Signals while ranks start: held back, not lost; the same wish, told to every process and twice, is one wish."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fourfold.launch import stop, watch
from fourfold.launch.agent import Launch, launch
from fourfold.launch.processes import LAUNCHER, Leash
from fourfold.launch.stop import STOP_SIGNALS, SignalsTaken, StopRequest, held
from fourfold.launch.watch import Outcome
from tests.launch.procs import lives, read_when_there

SLOW = Path(__file__).with_name("slow_rank.py")
PLAIN = Path(__file__).with_name("plain_rank.py")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(watch, "SETTLE_S", 0.5)
    for module in (stop, watch):
        monkeypatch.setattr(module, "SECOND_AFTER_S", 0.4)


def slow(run_dir: Path, how: str, meanwhile: Callable[[list[int]], None], **more: object) -> Outcome:
    """Two slow ranks, and what is done once both import, given their process ids."""

    def act() -> None:
        meanwhile([int(read_when_there(run_dir / f"importing{rank}")) for rank in (0, 1)])

    other = threading.Thread(target=act, daemon=True)
    other.start()
    request = Launch((sys.executable, str(SLOW), str(run_dir), how), 2, run_dir, **{"holds": True, **more})  # type: ignore[arg-type]
    with StopRequest() as stop:  # a signal that comes late must not end the tests
        outcome = launch(request, stop)
    other.join()
    assert not [rank for rank in (0, 1) if lives(int((run_dir / f"importing{rank}").read_text()))]
    return outcome


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_during_imports_is_taken_after_them(tmp_path, number):
    def tell(_: list[int]) -> None:
        os.kill(os.getpid(), number)
        (tmp_path / "imported").touch()

    assert slow(tmp_path, "wait", tell) == Outcome(75)


def test_signals_to_every_process_twice_are_one_wish(tmp_path, monkeypatch, capfd):
    for module in (stop, watch):
        monkeypatch.setattr(module, "SECOND_AFTER_S", 2.0)

    def tell(ranks: list[int]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            for pid in (os.getpid(), *ranks):
                os.kill(pid, number)
        (tmp_path / "imported").touch()
        read_when_there(tmp_path / "masks0")
        for pid in (os.getpid(), *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    assert slow(tmp_path, "wait", tell) == Outcome(75)
    assert "every rank had ended" in capfd.readouterr().err


def test_what_a_rank_starts_gets_signals_as_usual(tmp_path):
    def tell(_: list[int]) -> None:
        (tmp_path / "imported").touch()
        for rank in (0, 1):
            read_when_there(tmp_path / f"masks{rank}")
        os.kill(os.getpid(), signal.SIGTERM)

    assert slow(tmp_path, "wait", tell) == Outcome(75)
    stop_bits = sum(1 << (number - 1) for number in STOP_SIGNALS)
    for rank in (0, 1):
        masks = json.loads((tmp_path / f"masks{rank}").read_text())
        assert [[int(mask, 16) & stop_bits for mask in one.split()] for one in masks] == [[0, 0], [0, 0]]


def test_ranks_that_never_take_a_signal_are_killed_after_the_grace(tmp_path, capfd):
    outcome = slow(tmp_path, "hang", lambda _: os.kill(os.getpid(), signal.SIGTERM), grace_s=0.5)
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert "rank 0, 1 had not ended 0.5 s after SIGTERM" in capfd.readouterr().err


def test_a_second_signal_kills_ranks_that_import(tmp_path, capfd):
    def tell(_: list[int]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()

    assert slow(tmp_path, "hang", tell).exit_code == 128 + signal.SIGINT
    assert "a second signal, SIGINT" in capfd.readouterr().err


def test_a_program_that_takes_no_signals_dies_of_one_where_none_is_held(tmp_path):
    outcome = slow(tmp_path, "hang", lambda _: os.kill(os.getpid(), signal.SIGTERM), holds=False)
    assert outcome.exit_code == 128 + signal.SIGTERM


def test_a_signal_before_the_launch_is_the_ranks(tmp_path):
    command = (sys.executable, str(PLAIN), str(tmp_path), "wait")
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert launch(Launch(command, 2, tmp_path, holds=True), stop) == Outcome(75)


def test_signals_do_not_end_the_leash_while_it_starts():
    with Leash() as leash:
        for number in STOP_SIGNALS:
            os.kill(leash._process.pid, number)
    assert leash._process.returncode == 0


def test_a_rank_whose_launcher_is_gone_does_not_begin(tmp_path):
    env = os.environ | {
        LAUNCHER: "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run([sys.executable, str(PLAIN), str(tmp_path), "show"], env=env, check=False)
    assert done.returncode == 1
    assert not (tmp_path / "env0.json").exists()
    env[LAUNCHER] = str(os.getpid())
    subprocess.run([sys.executable, str(PLAIN), str(tmp_path), "show"], env=env, check=True)
    assert (tmp_path / "env0.json").exists()


def test_held_signals_come_in_once_they_are_taken():
    with held():
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # other threads hold nothing back
        with SignalsTaken() as taken:
            assert [number for number, _ in taken.seen] == [signal.SIGTERM]
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_list_goes_on_and_the_first_signal_counts():
    with StopRequest() as first:
        os.kill(os.getpid(), signal.SIGUSR1)
        with SignalsTaken(first.seen) as taken:
            time.sleep(0.6)
            os.kill(os.getpid(), signal.SIGTERM)
            while len(taken.seen) == 1:
                time.sleep(0.01)
        assert [number for number, _ in first.seen] == [signal.SIGUSR1, signal.SIGTERM]
        assert first.signal == signal.SIGUSR1
        assert first.waited_s > 0.4
    assert StopRequest().waited_s == 0


# A first signal was taken; then the main thread is in native code until its standard input ends.
NATIVE = """
import ctypes, os, signal, sys
from fourfold.launch import stop
stop.SECOND_AFTER_S = 0.5
with stop.StopRequest() as request:
    for number in stop.STOP_SIGNALS:
        signal.siginterrupt(number, False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.requested
    print(flush=True)
    getattr(ctypes, sys.argv[1])(None).read(0, ctypes.create_string_buffer(1), 1)
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("library", "again_after_s", "code"),
    [
        ("CDLL", 0.1, 75),  # as in a collective, which waits without the interpreter's lock
        ("CDLL", 1.0, 128 + signal.SIGINT),  # a second wish ends it even there
        ("PyDLL", 0.1, 75),  # as in the import of a large library, where no other thread can run
    ],
)
def test_one_wish_stays_one_while_native_code_runs(library, again_after_s, code):
    process = subprocess.Popen(
        [sys.executable, "-c", NATIVE, library], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(again_after_s)
    process.send_signal(signal.SIGINT)
    if code == 75:
        time.sleep(1.0)
    else:
        process.wait()
    process.communicate()
    assert process.returncode == code


FORKED = """
import os, signal, sys, time
from fourfold.launch.stop import SignalsTaken, StopRequest
with StopRequest() as request, SignalsTaken(request.seen):
    child = os.fork()
    if child == 0:
        time.sleep(1000)
        os._exit(3)
    os.kill(child, signal.SIGTERM)  # as multiprocessing's terminate() does
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    time.sleep(0.3)
    sys.exit(f"{ended} {request.requested}")
"""


def test_a_fork_dies_of_its_own_signals_and_its_parent_goes_on():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False)
    assert done.stderr == "-15 False\n"


def test_what_is_done_cannot_be_undone_by_asking_again():
    code = (
        "import os, signal\n"
        "from fourfold.launch.stop import STOP_SIGNALS, StopRequest\n"
        "with StopRequest() as stop:\n"
        "    stop.ignore()\n"
        "for number in STOP_SIGNALS:\n"
        "    os.kill(os.getpid(), number)\n"
        "assert not stop.requested\n"
        "raise SystemExit(75)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 75
