"""`fourfold train` with a model of one's own, asked for tensor parallel: with a sharding table and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = """
from examples.own_model import WindowKit


class Whole(WindowKit):
    def sharding(self):
        return {"*": "replicate"}


def factory():
    return Whole(4, 8, 1, 0.0)
"""
SMALL = (
    "layout.tp=2",
    "data.sequence=16",
    "batch.global_batch=4",
    "run.steps=2",
    "run.validate_every=0",
    "run.validation_batches=1",
)


def train(*sets: str) -> subprocess.CompletedProcess[str]:
    words = [word for setting in (*SMALL, *sets) for word in ("--set", setting)]
    return subprocess.run(
        [sys.executable, "-m", "fourfold", "train", "examples/own_model.toml", "--nproc", "2", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_with_a_table_it_trains(tmp_path: Path) -> None:
    done = train(f"run.dir={json.dumps(str(tmp_path / 'run'))}")
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stderr


def test_without_a_table_it_is_refused_in_four_parts(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "whole_model.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = train(
        f"run.dir={json.dumps(str(tmp_path / 'run'))}",
        "model={kind='import', target='whole_model:factory'}",
    )
    assert done.returncode == 2, done.stderr
    said = " ".join(done.stderr.split())
    assert "layout.tp = 2 found: a model whose sharding table cuts nothing" in said
    assert "why: tensor parallel would compute everything on every rank" in said
    assert "type: a sharding() that says which Linear is column and which row (docs/own_model.md)" in said
    assert "Traceback" not in done.stderr
