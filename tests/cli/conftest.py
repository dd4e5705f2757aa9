"""A Spec that a verb can be tried on, in a folder of its own."""

from __future__ import annotations

import pytest

SPEC = """
model = {kind = "mlp", inputs = 4}
data = {kind = "synthetic", samples = 50}
batch = {global_batch = 8, micro_batch = 2}
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SPEC)
    return "small.toml"
