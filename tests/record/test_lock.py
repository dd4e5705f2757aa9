from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from fourfold.record.lock import at_work, locked
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import DataError, SpecError


def test_a_second_owner_is_refused_and_the_first_is_named(tmp_path):
    run = RunDir(tmp_path)
    with locked(run):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        told = rf"in it: process {os.getpid()} on {re.escape(socket.gethostname())}, since 2\d\d\d-\d\d-\d\d \d\d:"
        with pytest.raises(SpecError, match=told), locked(run):
            pass
        for text in ("", '{"pid": 1', "[]", '{"pid": 1, "host": "a", "since": "then"}'):
            (tmp_path / "lock").write_text(text)
            with pytest.raises(SpecError, match="it has not said which"), locked(run):
                pass
    with locked(run):
        pass


def test_the_lock_goes_with_a_process_that_is_killed(tmp_path):
    code = (
        "import sys, time; from fourfold.record.lock import locked; from fourfold.record.run_dir import RunDir\n"
        "with locked(RunDir(sys.argv[1])):\n print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(SpecError, match=str(owner.pid)), locked(RunDir(tmp_path)):
            pass
        owner.kill()
        owner.wait()
    with locked(RunDir(tmp_path)):
        pass


def test_a_place_that_is_not_there_is_told(tmp_path):
    with pytest.raises(DataError, match="lock"), locked(RunDir(tmp_path / "nowhere")):
        pass


def test_whether_a_run_is_at_work(tmp_path):
    run = RunDir(tmp_path)
    assert not at_work(run) and not (tmp_path / "lock").exists()
    with locked(run):
        assert at_work(run)
    assert not at_work(run)
