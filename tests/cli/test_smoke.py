"""What `fourfold train --smoke` refuses, and prints before it starts anything."""

from __future__ import annotations

import json

import pytest

from fourfold.cli.main import main

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_dry_run_prints_the_plan_of_three_steps_and_starts_nothing(spec, capsys, tmp_path):
    assert main(["train", spec, "--nproc", "2", "--smoke", "--dry-run", "--json"]) == 0
    printed = capsys.readouterr()
    plan = json.loads(printed.out)
    assert (plan["schema"], plan["steps"], plan["world"]) == ("fourfold.plan/1", 3, 2)
    assert "for the smoke test: run.steps 100 -> 3" in printed.err
    assert not (tmp_path / "runs").exists()
    assert main(["train", spec, "--nproc", "2", "--smoke", "--dry-run"]) == 0
    assert capsys.readouterr().err.endswith("next: fourfold train small.toml --nproc 2 --smoke\n")


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--resume", "auto"], "--smoke with --resume auto"),
        (["--max-restarts", "2"], "--smoke with --max-restarts 2"),
    ],
)
def test_what_would_have_it_go_on_is_refused(spec, capsys, words, asked):
    assert main(["train", spec, "--nproc", "2", "--smoke", *words]) == 2
    err = capsys.readouterr().err
    assert asked in err and "type:  fourfold train small.toml --nproc 2 --smoke" in err


def test_a_run_directory_that_is_used_is_refused_with_what_a_smoke_test_takes(spec, capsys, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "spec.json").write_text("{}")
    assert main(["train", spec, "--smoke", "--set", "run.dir=used"]) == 2
    err = capsys.readouterr().err
    assert "type:  --set run.dir=used-1\n" in err and "--resume" not in err
    assert main(["train", spec, "--set", "run.dir=used"]) == 2
    assert "type:  --set run.dir=used-1, or --resume auto to go on with it\n" in capsys.readouterr().err


def test_under_torchrun_it_is_refused_in_four_parts(spec, capsys, monkeypatch):
    for name, value in {**TORCHRUN, **MASTER}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", spec, "--nproc", "2", "--set", "run.seed=3", "--smoke"]) == 2
    err = capsys.readouterr().err
    assert "--smoke under torchrun" in err
    assert all(f"{part}:" in err for part in ("found", "why", "type"))
    assert "fourfold train small.toml --nproc 2 --set run.seed=3 --smoke" in err
