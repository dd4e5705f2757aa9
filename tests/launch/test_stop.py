from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fourfold.launch import stop
from fourfold.launch.stop import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_remembered_and_the_handlers_come_back(number):
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with StopRequest() as request:
        assert not request.requested
        os.kill(os.getpid(), number)
        assert request.requested
        assert request.signal == number
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


def test_the_same_signal_delivered_twice_is_one_request():
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal == signal.SIGTERM


def test_a_second_signal_later_ends_the_process_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(stop, "SECOND_AFTER_S", 0.1)
    monkeypatch.setattr(os, "_exit", ended.append)
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGINT)
        while not ended:
            time.sleep(0.01)
    assert ended == [128 + signal.SIGINT]


def test_in_another_thread_it_is_a_request_that_never_comes():
    seen = []

    def work() -> None:
        with StopRequest() as request:
            seen.append(request.requested)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_python_did_not_set_becomes_the_default(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: (calls.append((number, handler)), None)[1])
    calls: list[tuple[int, object]] = []
    with StopRequest():
        pass
    assert [handler for _, handler in calls[len(STOP_SIGNALS) :]] == [signal.SIG_DFL] * len(STOP_SIGNALS)


def test_it_needs_no_torch():
    code = (
        "import sys, fourfold.launch.stop, fourfold.launch.pulse, fourfold.launch.guard, fourfold.launch.pool;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
