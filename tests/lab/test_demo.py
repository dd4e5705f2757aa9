from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fourfold.lab.demo import NOT_SHOWN


@pytest.mark.timeout(400)
def test_the_demonstration_trains_proves_and_reports(tmp_path):
    """The whole of `make demo`, as a person starts it."""
    done = subprocess.run(
        [sys.executable, "-m", "fourfold", "lab", "demo", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"] == "pass"
    kinds = {
        kind: [f for f in document["findings"] if f["kind"] == kind] for kind in ("fact", "inference", "open")
    }
    assert len(kinds["fact"]) > 10
    assert [finding["verdict"] for finding in kinds["inference"]] == ["pass"]
    assert len(kinds["open"]) >= len(NOT_SHOWN)
    page = (tmp_path / "runs" / "tiny-1" / "report.html").read_text()
    for finding in document["findings"]:
        assert finding["verdict"] in ("pass", "open")
    assert "loss curve" in page
    assert "4/4  report" in done.stderr
