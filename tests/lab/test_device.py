from __future__ import annotations

import pytest
import torch

from fourfold.lab import device as lab
from fourfold.lab.device import lab_device, why_not


def test_without_a_device_it_is_skipped_and_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = lab_device("cuda")
    assert found["schema"] == "fourfold.lab.device/1" and found["verdict"] == "open"
    (finding,) = found["findings"]
    assert finding["verdict"] == "open" and finding["measured"] == why_not("cuda")
    assert f"torch {torch.__version__}" in finding["measured"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert why_not("cuda") == f"torch {torch.__version__}, built for CUDA 13.0, finds no device or no driver"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "An old one")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert str(why_not("cuda")).startswith("An old one of compute capability 7.5, below 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert why_not("cuda") is None and why_not("cpu") is None


@pytest.fixture
def small(monkeypatch):
    """Parts with checks of their own stand aside; small is tiny, for fewer steps."""
    passed = {"verdict": "pass", "findings": [lab.fact("it holds", "1", "1", True).model_dump(mode="json")]}
    for name in ("smoke", "verify_equal", "lab_precision"):
        monkeypatch.setattr(lab, name, lambda *_, **__: passed)
    plan = lab._Check.plan
    monkeypatch.setattr(lab._Check, "plan", lambda self, _, *sets: plan(self, "tiny", *sets, *EXTRA))
    monkeypatch.setattr(lab, "STEPS", 14)


EXTRA = ("model.layers=1", "optimizer.warmup_steps=2", "run.validate_every=0")


@pytest.mark.usefixtures("small")
def test_the_parts_are_one_document(tmp_path):
    told = []
    found = lab_device("cpu", out=tmp_path / "out", say=told.append)
    assert found["verdict"] == "pass" and found["device_name"] == "the CPU"
    claims = [finding["claim"] for finding in found["findings"]]
    assert [claim.partition(":")[0] for claim in claims] == [
        "training", "fp64", "precision", "memory", "step", "step",
    ]  # fmt: skip
    assert [entry["title"] for entry in found["step"]] == ["fp32", "bf16"]  # no TF32 on a CPU
    assert found["memory"]["state_bytes"] > 0 and found["memory"]["peak_allocated_bytes"] is None


@pytest.mark.usefixtures("small")
def test_bytes_that_are_not_as_predicted_fail_it(tmp_path, monkeypatch):
    right = lab.rank_bytes

    def too_few(spec, rank):
        found = {at: dict(counts) for at, counts in right(spec, rank).items()}
        found["after the step"]["moments"] //= 2
        return found

    monkeypatch.setattr(lab, "rank_bytes", too_few)
    found = lab_device("cpu", out=tmp_path / "out")
    (failed,) = [finding for finding in found["findings"] if finding["verdict"] == "fail"]
    assert found["verdict"] == "fail" and "moments after the step" in failed["measured"]
