"""The Spec of `small.py`, the shipped verbs on it, and the score of a file."""

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
from tests.verify.small import write_small


@pytest.fixture(scope="session")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small.SPEC` as a file, beside its text."""
    return write_small(tmp_path_factory.mktemp("small"))


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
