from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fourfold.record.writer import JsonLines
from fourfold.spec.errors import CheckFailed
from fourfold.train import meter
from fourfold.train.checks import NonFinite
from fourfold.train.step import LossPair, Totals


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    return clock


def add(of: meter.Meter, step: int, loss_sum: float = 6.0, agreed: int = 3) -> None:
    """A step of two microbatches of 8 tokens, 6 and 5 of them text, 3 targets valid in all."""
    batches: Any = [SimpleNamespace(processed=8, nonpadding=held) for held in (6, 5)]
    pair = LossPair(torch.tensor(loss_sum, dtype=torch.float64), torch.tensor(3))
    of.add(step, batches, pair, torch.tensor(1.0 + step), 0.1 * (step + 1), Totals(agreed, False))


def test_every_step_has_its_own_line_and_rates_are_over_the_interval(clock, tmp_path):
    with JsonLines(tmp_path / "metrics.jsonl") as lines:
        of = meter.Meter(lines)
        clock.now = 10.0  # until now ranks and data were opened
        of.restart_clock()
        add(of, 0)
        of.leave_out(2.0)
        add(of, 1, loss_sum=9.0)
        clock.now = 16.0
        newest = of.flush()
        assert of.flush() is None
        add(of, 2)
        clock.now = 17.0
        of.flush()
    first, second, third = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert second == newest
    assert [first[key] for key in ("step", "loss", "grad_norm", "lr")] == [1, 2.0, 1.0, 0.1]
    assert [second[key] for key in ("step", "loss", "grad_norm", "lr")] == [2, 3.0, 2.0, 0.2]
    assert [first[key] for key in ("tokens", "nonpadding", "loss_tokens")] == [16, 11, 3]
    assert [first[key] for key in ("step_s", "tokens_per_s", "nonpadding_per_s", "loss_tokens_per_s")] == [
        2.0,
        8.0,
        5.5,
        1.5,
    ]
    assert third["step_s"] == 1.0


def test_a_rank_that_writes_nothing_has_the_same_line(clock):
    of = meter.Meter(None)
    add(of, 0)
    clock.now = 1.0
    assert of.flush()["loss"] == 2.0


def test_a_line_that_is_not_finite_or_over_other_targets_ends_the_run_and_is_kept(clock, tmp_path):
    for number, (wrong, error) in enumerate(
        (({"loss_sum": float("nan")}, NonFinite), ({"agreed": 4}, CheckFailed))
    ):
        path = tmp_path / f"{number}.jsonl"
        with JsonLines(path) as lines:
            of = meter.Meter(lines)
            add(of, 0)
            add(of, 1, **wrong)
            clock.now += 1.0
            with pytest.raises(error, match="step 2"):
                of.flush()
        assert len(path.read_text().splitlines()) == 2
