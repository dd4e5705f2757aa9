"""Metrics of every step, summed over ranks once per logging interval; in between nothing waits for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.collectives.sums import sum_exactly, sum_floats
from fourfold.data.batch import Batch
from fourfold.record.writer import JsonLines
from fourfold.spec.errors import CheckFailed, DataError
from fourfold.train.checks import check_line, check_scales
from fourfold.train.scaler import Scaled
from fourfold.train.step import LossPair, Totals


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    pair: LossPair
    norm: Tensor
    rate: float
    totals: Totals
    tokens: tuple[int, int]
    scaled: Scaled | None


class Meter:
    """Collects steps and writes one line of metrics for each; rank 0 has `lines`, the others None."""

    def __init__(self, lines: JsonLines | None, counts: bool = True) -> None:
        """counts: whether this rank speaks for its samples (`Parallel.counts`)."""
        self._lines = lines
        self._counts = counts
        self._pending: list[_Pending] = []
        self._since = time.perf_counter()

    def restart_clock(self) -> None:
        """The first step begins now."""
        self._since = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leave out of the rates what was not training (validation)."""
        self._since += seconds

    def add(
        self,
        step: int,
        batches: Sequence[Batch],
        pair: LossPair,
        norm: Tensor,
        rate: float,
        totals: Totals,
        scaled: Scaled | None = None,
    ) -> None:
        """One finished step (from 0). Nothing is read from the device here.

        scaled: under loss scaling, what became of it.
        """
        tokens = (sum(batch.processed for batch in batches), sum(batch.nonpadding for batch in batches))
        self._pending.append(_Pending(step, pair, norm, rate, totals, tokens, scaled))

    def flush(self) -> dict[str, float] | None:
        """Sum what was collected over ranks and write it; returns the newest line, None if there was nothing.

        Collectives: one all-reduce of six fp64 numbers per collected step, on the CPU; in exact mode one all-gather of
        objects.
        Raises CheckFailed for a line that is not finite, or whose targets are not those of the batches, and where ranks
        scaled or skipped otherwise than the others; DataError where a line cannot be written.
        """
        if not self._pending:
            return None
        steps, self._pending = self._pending, []
        device_part = torch.stack([torch.stack([s.pair.sum, s.pair.count.double()]) for s in steps]).cpu()
        host_part = torch.tensor([s.tokens for s in steps], dtype=torch.float64)
        own = torch.cat([device_part, host_part], dim=1)
        if not self._counts:
            own.zero_()
        scales = torch.tensor([s.scaled or Scaled(1.0, False) for s in steps], dtype=torch.float64)
        summed = sum_floats(torch.cat([own, scales], dim=1)).tolist()
        if steps[0].pair.each is not None:
            losses = sum_exactly([s.pair.each.tolist() for s in steps if s.pair.each is not None])
            summed = [[loss, *others] for loss, (_, *others) in zip(losses, summed, strict=True)]
        norms = torch.stack([s.norm for s in steps]).tolist()
        now = time.perf_counter()
        step_s = (now - self._since) / len(steps)
        self._since = now
        lines: list[dict[str, float]] = []
        for pending, norm, (loss_sum, count, processed, nonpadding, *scaled) in zip(
            steps, norms, summed, strict=True
        ):
            line: dict[str, float] = {
                "step": pending.step + 1,
                "loss": loss_sum / max(count, 1.0),
                "grad_norm": norm,
                "lr": pending.rate,
                "tokens": int(processed),
                "nonpadding": int(nonpadding),
                "loss_tokens": int(count),
                "step_s": step_s,
                "tokens_per_s": processed / step_s,
                "nonpadding_per_s": nonpadding / step_s,
                "loss_tokens_per_s": count / step_s,
                "time": time.time(),
            }
            if pending.scaled is not None:
                line |= {"scale": pending.scaled.scale, "skipped": int(pending.scaled.skipped)}
            lines.append(line)
            try:
                check_line(line, pending.totals.count)
                if pending.scaled is not None:
                    check_scales(pending.step + 1, pending.scaled, scaled)
            except CheckFailed:  # on every rank: the line that is refused is in the record
                with suppress(DataError):
                    self._write(lines)
                raise
        self._write(lines)
        return lines[-1]

    def _write(self, lines: Sequence[dict[str, float]]) -> None:
        if self._lines is not None:
            for line in lines:
                self._lines.write(line)
