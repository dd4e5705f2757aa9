from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fourfold.lab import demo

SHORT = (
    "run.steps=4",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=2",
    "run.validation_batches=2",
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_demonstration_trains_proves_and_reports(tmp_path, whole):
    """`make demo`, as a person starts it: all of it, or with a smaller model and fewer steps."""
    settings = demo.SETTINGS if whole else (*demo.SETTINGS, *SHORT)
    code = (
        "import sys; from fourfold.lab import demo; from fourfold.cli.main import main; "
        f"demo.SETTINGS = {settings!r}; sys.exit(main(['lab', 'demo', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"] == "pass"
    kinds = {
        kind: [f for f in document["findings"] if f["kind"] == kind] for kind in ("fact", "inference", "open")
    }
    assert len(kinds["fact"]) > 10
    assert [finding["verdict"] for finding in kinds["inference"]] == ["pass"]
    assert len(kinds["open"]) >= len(demo.NOT_SHOWN)
    page = (tmp_path / "runs" / "tiny-1" / "report.html").read_text()
    for finding in document["findings"]:
        assert finding["verdict"] in ("pass", "open")
    assert "loss curve" in page
    assert "4/4  report" in done.stderr
