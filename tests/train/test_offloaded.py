"""Moments on disk: the same run, bit for bit, saved and gone on with as any other; and what a run records of memory."""

from __future__ import annotations

import json
import signal
import subprocess
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from fourfold.lab.resume_disk import bits_of, interrupted, saved
from fourfold.launch.rank import Joined, Rank
from fourfold.parallel.offload import MappedMoments, mapped
from fourfold.plan.state_bytes import INSTANTS, rank_bytes
from fourfold.record.run_dir import RunDir
from fourfold.spec.training import OptimizerSpec
from fourfold.train.optimizer import Optimizer
from fourfold.train.setup import _room_on_disk
from tests.cli.test_train import command
from tests.train import rank_jobs
from tests.train.saver_jobs import live
from tests.train.test_resume import SLOW, go_to_the_end, kill_after, same

SETS = ("model.hidden=7", "batch.global_batch=8", "batch.micro_batch=2", "checkpoint.every=2")
DISK = ("layout.offload=disk",)


def moments(bits: dict[str, bytes]) -> dict[str, bytes]:
    return {key: data for key, data in bits.items() if ".exp_avg" in key}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_run_with_moments_on_disk_is_the_same_run(ranks, tmp_path, zero):
    sets = (*SETS, f"layout.zero={zero}")
    in_memory, on_disk = RunDir(tmp_path / "memory"), RunDir(tmp_path / "disk")
    for run, more in ((in_memory, ()), (on_disk, DISK)):
        assert ranks(2).run(live, str(run.path), (*sets, *more)) == ["finished"] * 2
    for step in (2, 4):
        expected = bits_of(saved(in_memory, step))
        assert bits_of(saved(on_disk, step)) == expected
        assert len(moments(expected)) >= 12
    assert moments(bits_of(saved(on_disk, 2))) != moments(bits_of(saved(on_disk, 4)))
    assert list(on_disk.offload.iterdir()) == []
    assert not in_memory.offload.exists()
    (on_disk.path / "spec.toml").touch()
    for name in ("spec.json", "plan.json"):
        (on_disk.path / name).write_text("{}")
    again = interrupted(on_disk, tmp_path / "again", 2, [2])
    resumed = ranks(2).run(live, str(again.path), (*sets, *DISK), str(saved(again, 2)))
    assert resumed == ["finished"] * 2
    assert bits_of(saved(again, 4)) == bits_of(saved(on_disk, 4))


def test_a_parameter_that_was_never_updated_has_no_moments_on_disk_either(tmp_path):
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    parameters = {"used": used, "unused": unused}
    reserve = partial(mapped, tmp_path, 0)
    optimizer = Optimizer(parameters, OptimizerSpec(), lambda held: MappedMoments(held, reserve))
    used.grad = torch.ones(2, 2)
    optimizer.step(parameters, 0.1)
    assert set(optimizer.state_of("used")) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state_of("unused") == {} and (unused == 1).all()
    assert optimizer.state_of("used")["exp_avg"].untyped_storage().filename is not None


def test_a_run_records_what_each_rank_holds_beside_what_was_predicted(ranks, tmp_path):
    sets = ("batch.global_batch=8", "batch.micro_batch=2", "layout.zero=3", "model.hidden=7")
    assert ranks(2).run(live, str(tmp_path), sets) == ["finished"] * 2
    predicted = [rank_bytes(rank_jobs.spec(2, *sets), rank) for rank in (0, 1)]
    for rank in (0, 1):
        told = [e for e in rank_jobs.events(str(tmp_path), rank) if e["kind"] == "memory"]
        assert [(e["step"], e["instant"]) for e in told] == [
            (0, INSTANTS[0]),
            *((step, instant) for step in (1, 2) for instant in INSTANTS[1:]),
        ]
        steady = {e["instant"]: e["bytes"] for e in told}
        assert steady == predicted[rank]
        first = next(e for e in told if e["instant"] == INSTANTS[1])
        assert first["step"] == 1 and first["bytes"]["moments"] == 0
    assert predicted[0] != predicted[1]


def test_a_folder_that_is_not_there_is_refused_and_no_run_directory_is_left(tmp_path):
    run, place = tmp_path / "run", tmp_path / "no" / "such"
    sets = ("layout.offload=disk", f"layout.offload_dir={json.dumps(str(place))}")
    asked = command(sets=(f"run.dir={json.dumps(str(run))}", *sets))
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert f"MiB for the moments in {place}" in done.stderr and f"mkdir -p {place}" in done.stderr
    for part in ("found: No such file", "why:   folders above it are not made", "type:  mkdir"):
        assert part in done.stderr
    assert done.stderr.count("found:") == 1 and f"the name {run} is free again" in " ".join(
        done.stderr.split()
    )
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_is_the_home_as_it_is_for_data(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = rank_jobs.spec(1, *DISK, "layout.offload_dir='~/moments'")
    alone = Joined(Rank(0, 0, 1, 1), HashStore(), torch.device("cpu"))
    _room_on_disk(asked, alone, None)({"w": torch.zeros(3)})
    assert (tmp_path / "moments").is_dir()


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_that_is_killed_leaves_nothing_there_and_the_run_goes_on_as_the_same(tmp_path, zero):
    place, undisturbed, run = (tmp_path / name for name in ("moments", "undisturbed", "run"))
    sets = (SLOW, f"layout.zero={zero}")
    go_to_the_end(undisturbed, sets=sets)
    disk = (*sets, *DISK, f"layout.offload_dir={json.dumps(str(place))}")
    assert kill_after(run, 6, signal.SIGKILL, *disk) == 128 + 9
    assert list(place.iterdir()) == []
    assert "step-00000004" in go_to_the_end(run, "--resume", "auto", sets=disk)
    assert list(place.iterdir()) == []
    same(run, undisturbed)
