from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch

from fourfold.launch.rank import Joined, Rank
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import FourfoldError
from fourfold.train import rank
from tests.train.rank_jobs import plan


def test_leaving_by_sys_exit_in_a_step_is_no_good_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rank, "guard", lambda *_: nullcontext())
    monkeypatch.setattr(rank, "train", lambda *_, **__: sys.exit(0))
    joined = Joined(Rank(0, 0, 1, 1), None, torch.device("cpu"))
    with pytest.raises(FourfoldError, match="SystemExit: 0"):
        rank._train_guarded(plan(1), joined, RunDir(tmp_path), None)
