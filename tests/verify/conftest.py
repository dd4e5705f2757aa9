"""A Spec that is small, and awkward where it matters: dropout, tied weights, biases, documents, grouped heads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import main
from fourfold.launch.pool import RankPool
from fourfold.spec.load import load_spec
from fourfold.spec.spec import Spec

SPEC = """
[model]
kind = "decoder"
layers = 2
width = 32
heads = 2
kv_heads = 1
tied = true
biases = true
dropout = 0.1

[data]
kind = "text"
path = "{text}"
sequence = 64

[batch]
global_batch = 8
micro_batch = 2

[optimizer]
warmup_steps = 4

[run]
steps = 20
"""


@pytest.fixture(scope="session")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Spec as a file, beside its text: 60 documents of unequal length, 150 training samples or so."""
    folder = tmp_path_factory.mktemp("small")
    text = folder / "text"
    text.mkdir()
    for number in range(60):
        words = [f"word{(number * 7 + i * i) % 97}" for i in range(10 + 13 * number % 41)]
        (text / f"{number:02}.txt").write_text(" ".join(words), encoding="utf-8")
    path = folder / "small.toml"
    path.write_text(SPEC.format(text=text), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small(spec_file: Path) -> Callable[..., Spec]:
    """`small("model.dropout=0.0", ...)` is that Spec with settings."""
    return lambda *sets: load_spec(spec_file, sets).spec


Verb = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def verb(
    spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Verb:
    """`verb("equal", "--steps", "2", fault="module:function")` is the shipped command: code, document.

    A fault is planted in the ranks alone: the command, its reference and its ledger run as they are.
    """

    def call(
        name: str,
        *options: str,
        fault: str | None = None,
        sets: Sequence[str] = (),
        world: int = 2,
    ) -> tuple[int, dict[str, Any]]:
        def pool(world: int, *, timeout_s: float, setup: str | None, device: str = "cpu") -> RankPool:
            assert setup is None, "the command plants nothing"
            return RankPool(world, timeout_s=min(timeout_s, 60.0), setup=fault, device=device)

        module = {"equal": "case"}.get(name, name)
        monkeypatch.setattr(f"fourfold.verify.{module}.RankPool", pool)
        settings = [word for setting in sets for word in ("--set", setting)]
        arguments = ["verify", name, str(spec_file), "--world", str(world), *options, *settings]
        code = main([*arguments, "--out", str(tmp_path / "out"), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(scope="module")
def score(request):
    """What was caught, and how many clean runs passed; printed at the end."""
    caught: dict[str, bool] = {}
    yield caught
    faults = [name for name in caught if not name.startswith("clean")]
    clean = [name for name in caught if name.startswith("clean")]
    told = (
        f"\n{request.module.__name__}: planted faults caught {sum(caught[n] for n in faults)} of {len(faults)}, "
        f"clean runs passed {sum(caught[n] for n in clean)} of {len(clean)}"
    )
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(told, file=sys.__stdout__, flush=True)
