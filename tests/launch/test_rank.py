from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from fourfold.launch import rank as rank_module
from fourfold.launch.agent import LoopbackRendezvous
from fourfold.launch.rank import Rank, join, loopback
from fourfold.spec.errors import SpecError

GIVEN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture
def environment(monkeypatch):
    for name in (*GIVEN, "FOURFOLD_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def give(**given: str) -> None:
        for name, value in given.items():
            monkeypatch.setenv(name, value)

    return give


def test_no_launcher_no_rank(environment):
    assert Rank.from_environment() is None
    environment(
        RANK="0", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1"
    )  # as some schedulers do, per machine
    assert Rank.from_environment() is None


def test_a_launcher_says_who_this_is(environment):
    environment(**GIVEN)
    assert Rank.from_environment() == Rank(5, 1, 8, 4, 0)
    environment(TORCHELASTIC_RESTART_COUNT="2")
    assert Rank.from_environment() == Rank(5, 1, 8, 4, 2)
    environment(FOURFOLD_ATTEMPT="3")
    assert Rank.from_environment() == Rank(5, 1, 8, 4, 3)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"RANK": ""}, "not RANK"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({"WORLD_SIZE": "two"}, "two"),
    ],
)
def test_half_a_rank_is_refused(environment, change, found):
    environment(**(GIVEN | change))
    with pytest.raises(SpecError, match=found):
        Rank.from_environment()


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SpecError, match="--nproc 1"), join(Rank(1, 1, 2, 2), "cuda", 1.0):
        pass
    assert rank_module.bind("auto", Rank(1, 1, 2, 2)).type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SpecError, match=r'hardware\.device="cpu"'), join(Rank(0, 0, 1, 1), "cuda", 1.0):
        pass


def test_a_rank_that_does_not_come_is_named(environment, monkeypatch):
    host = LoopbackRendezvous(timedelta(seconds=5))
    info = host.next_rendezvous().bootstrap_store_info
    environment(
        **GIVEN | {"MASTER_PORT": str(info.master_port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
    )
    monkeypatch.setattr(rank_module, "START_S", 0.2)
    with pytest.raises(torch.distributed.DistStoreError) as caught, join(Rank(1, 1, 3, 3), "cpu", 0.2):
        pass
    assert caught.value.__notes__ == ["rank 0, 2 of 3 has not come"]


def test_this_machine_has_a_loopback_interface():
    assert loopback() in ("lo", "lo0")


def test_the_same_program_runs_under_torchrun_and_the_cause_is_told_there(tmp_path):
    program = Path(__file__).with_name("torch_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, str(program), str(tmp_path), "60", "raise"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "rank 1 failed at step 5 (forward): ValueError: an error of its own" in ended.stderr
    _, _, cause = ended.stderr.partition("Root Cause")
    assert "rank      : 1" in cause
    assert "ValueError: an error of its own" in cause
