from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import pytest
import torch

from fourfold.launch.pool import RankPool
from fourfold.spec.errors import RankFailed, SpecError
from tests.launch import pool_jobs
from tests.launch.procs import lives, read_when_there, wait_until_gone


def test_jobs_run_in_every_rank_and_results_come_in_order():
    with RankPool(2, timeout_s=60) as pool:
        assert pool.run(pool_jobs.add_up, 1.0) == [torch.tensor([3.0])] * 2
        assert pool.run(pool_jobs.add_up, 0.0, per_rank=[10.0, 20.0]) == [torch.tensor([31.0])] * 2
        assert pool.run(pool_jobs.what_is_planted) == ["nothing"] * 2
        big = os.urandom(1 << 22)  # more than a pipe holds
        assert pool.run(pool_jobs.echo, big) == [big, big]
        seen = pool.run(pool_jobs.surroundings)
        assert [(threads, leader, handlers) for threads, _, leader, handlers in seen] == [(1, True, True)] * 2
    wait_until_gone(*(pid for _, pid, _, _ in seen))
    assert not pool.alive
    pool.close()


def test_a_world_of_one_has_a_process_group_too():
    with RankPool(1, timeout_s=60, threads=2, setup="tests.launch.pool_jobs:plant") as pool:
        assert pool.run(pool_jobs.add_up, 1.0) == [torch.tensor([1.0])]
        assert pool.run(pool_jobs.what_is_planted) == ["a fault"]
        assert pool.run(pool_jobs.surroundings)[0][0] == 2


@pytest.mark.parametrize(
    ("how", "exit_code", "says"),
    [
        ("raise", 1, "rank 1 failed: ValueError: an error of its own"),
        ("check", 3, "rank 1 failed: asked"),
        ("kill", 137, "rank 1 was killed by SIGKILL"),
        ("exit", 7, "rank 1 failed: its process ended with exit code 7"),
        ("hang", 137, "rank 1 hung: no answer within 2 s"),
    ],
)
def test_any_failure_names_the_rank_and_ends_the_pool(how, exit_code, says):
    pool = RankPool(2, timeout_s=60)
    pids = [pid for _, pid, _, _ in pool.run(pool_jobs.surroundings)]
    pool.timeout_s = 2.0 if how == "hang" else 60.0
    with pytest.raises(RankFailed) as caught:
        pool.run(pool_jobs.fail, 1, how)
    assert (caught.value.rank, caught.value.exit_code) == (1, exit_code)
    assert says in str(caught.value)
    assert ("pool_jobs.py" in str(caught.value)) == (how not in ("kill", "exit"))  # where it stood
    assert not pool.alive
    assert not [pid for pid in pids if lives(pid)]
    with pytest.raises(RankFailed, match="the pool has ended"):
        pool.run(pool_jobs.echo, b"")


def test_a_rank_that_dies_between_jobs_is_noticed():
    with RankPool(2, timeout_s=60) as pool:
        pid = pool.run(pool_jobs.surroundings)[1][1]
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)
        with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
            pool.run(pool_jobs.echo, b"")


def test_a_setup_that_fails_is_told_at_the_first_job():
    pool = RankPool(1, timeout_s=60, setup="tests.launch.pool_jobs:plant_badly")
    with pytest.raises(RankFailed, match="no such fault"):
        pool.run(pool_jobs.echo, b"")


def test_a_result_that_cannot_be_pickled_is_that_ranks_error():
    with RankPool(1, timeout_s=60) as pool, pytest.raises(RankFailed, match="rank 0 failed"):
        pool.run(pool_jobs.unpicklable)


def test_an_argument_that_cannot_be_pickled_does_the_pool_no_harm():
    with RankPool(1, timeout_s=60) as pool:
        with pytest.raises(Exception, match="pickle"):
            pool.run(pool_jobs.echo, lambda: None)
        assert pool.run(pool_jobs.echo, b"x") == [b"x"]


def test_a_pool_that_is_forgotten_leaves_nothing():
    pool = RankPool(1, timeout_s=60)
    pid, folder = pool.run(pool_jobs.surroundings)[0][1], pool._folder
    del pool
    gc.collect()
    wait_until_gone(pid)
    assert not folder.exists()


def test_ranks_end_with_a_parent_that_is_killed_in_the_middle_of_a_job(tmp_path):
    code = f"from tests.launch.pool_jobs import hold_a_pool; hold_a_pool({str(tmp_path)!r})"
    parent = subprocess.Popen([sys.executable, "-W", "error", "-c", code])
    pids = [int(pid) for rank in "01" for pid in read_when_there(tmp_path / rank).split()]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until_gone(*pids)


def test_what_is_no_pool_is_refused():
    with pytest.raises(SpecError, match="world = 0"):
        RankPool(0)
    with pytest.raises(SpecError, match="module:function"):
        RankPool(1, setup="module.function")
