"""The first deviating value in execution order, from the traces of the reference and of every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.record.reader import read_lines
from fourfold.verify.measure import SMALLEST_SHARE, relative_gap, within
from fourfold.verify.trace import BACKWARD, BATCH, FORWARD, GRADIENT, IDS, LOSS, NORM, REDUCED, STAGES, WEIGHT

# Fingerprints are sums over a row and carry a little more rounding than the values (honest runs: 4e-15 measured).
TRACE_TOLERANCE = 1e-11

Key = tuple[str, str, int]  # kind, name, call
Values = NDArray[np.float64]
RowsOf = Callable[[int, int], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Deviation:
    """Where a layout first leaves one device. step counts from 1, microbatch and rank from 0; None: of all together.

    phase: batch, forward, weight (of the loss), backward; after the microbatches: loss, gradient before the
    reduction, gradient before clipping, norm, clipped gradient, update; or the end, where a rank raised.
    place: the module or tensor. axis: the mesh axis whose collective stands between the last agreeing value and this
    one, "" if none does. after: that last agreeing value.
    """

    step: int
    microbatch: int | None
    rank: int | None
    phase: str
    place: str
    axis: str
    gap: float
    after: str
    note: str = ""

    def __str__(self) -> str:
        where = [f"step {self.step}"]
        where += [f"microbatch {self.microbatch}"] if self.microbatch is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else ["all ranks together"]
        text = f"{', '.join(where)}: {self.phase} of {self.place}"
        text += f", after the reduction over {self.axis}" if self.axis else ""
        text += f"; gap {self.gap:.3g}"
        text += f"; {self.note}" if self.note else ""
        return text + (f"; what came before agrees ({self.after})" if self.after else "")


@dataclass(slots=True)
class _Trace:
    """One file: microbatches by (step, microbatch), stages by step, and where and why the rank raised.

    counts: whether the rank speaks for its samples. output, behind, loss: see `whole.Collectives`.
    here: the modules and parameters of this rank's stages, None: all of them; has_loss: whether the loss is here.
    share: which part of the global batch it computes; ranks of one share have the same loss.
    """

    micros: dict[tuple[int, int], dict[Key, Values]] = field(default_factory=dict)
    stages: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    failed: tuple[int, str] | None = None
    counts: bool = True
    output: Mapping[str, str] = field(default_factory=dict)
    behind: Mapping[str, str] = field(default_factory=dict)
    loss: str = ""
    here: frozenset[str] | None = None
    has_loss: bool = True
    share: int = -1

    def due(self, key: Key) -> bool:
        """Whether this happens on this rank."""
        kind, name, _ = key
        if kind in (LOSS, WEIGHT):
            return self.has_loss
        return self.here is None or kind == BATCH or name in self.here

    def complete(self, step: int, micro: int) -> bool:
        """Whether the rank went beyond this microbatch: what it lacks did not run. Else it may have been killed."""
        failed_here = self.failed is not None and self.failed[0] == step
        return (step, micro + 1) in self.micros or step in self.stages or failed_here

    def keys(self, step: int) -> list[Key]:
        """Everything that ran in a step, in order."""
        return list(dict.fromkeys(key for (s, _), micro in self.micros.items() if s == step for key in micro))


class _Expected:
    """The reference's trace: what every row of the global batch gives at every event."""

    def __init__(self, trace: _Trace) -> None:
        self.trace = trace
        self._rows: dict[tuple[int, Key], dict[int, Values]] = {}
        self._sizes: dict[tuple[int, Key], float] = {}
        for (step, _), micro in trace.micros.items():
            rows = micro[BATCH, IDS, 0][:, 0].astype(int).tolist()
            for key, values in micro.items():
                if key[0] not in (LOSS, WEIGHT, GRADIENT) and len(values) == len(rows):
                    self._rows.setdefault((step, key), {}).update(zip(rows, values, strict=True))
        for at, held in self._rows.items():
            self._sizes[at] = float(np.max(np.abs(list(held.values()))))

    def of(self, step: int, key: Key, rows: Sequence[int]) -> Values | None:
        """The fingerprints of these rows: [B, P]; None where some have none."""
        held = self._rows.get((step, key), {})
        return np.array([held[row] for row in rows]) if all(row in held for row in rows) else None

    def scale(self, step: int, key: Key) -> float:
        """The `largest_of_kind` of an event: all rows count in full, for what is masked in some is not in others."""
        return self._sizes[step, key] / SMALLEST_SHARE


def first_deviation(
    reference: Path, ranks: Mapping[int, Path], rows: RowsOf, axes: Sequence[str]
) -> Deviation | None:
    """Compare the trace of each rank with the reference's, in execution order. None if nothing deviates.

    ranks: rank -> its trace; rows(rank, micro): the rows of the global batch that it must hold.
    axes: the mesh axes over which gradients are reduced, where a trace does not say it tensor by tensor.
    """
    expected = _Expected(_read(reference))
    held = {rank: _read(path) if path.exists() else _Trace() for rank, path in ranks.items()}
    for step in sorted({step for step, _ in expected.trace.micros}):
        absent: list[Deviation] = []
        micros = 1 + max((m for trace in held.values() for s, m in trace.micros if s == step), default=-1)
        for micro in range(micros):
            due = {rank: [int(row) for row in rows(rank, micro)] for rank in held}
            found = _in_microbatch(expected, held, step, micro, due, absent)
            if found is not None:
                return found
        last = f"every forward and backward of {micros} microbatches" if micros else ""
        found = _in_losses(expected, held, step, last) or _in_stages(expected, held, step, last, axes, absent)
        if found is not None:
            return found
        for rank, trace in held.items():
            if trace.failed is not None and trace.failed[0] == step:
                note = trace.failed[1]
                return next(
                    iter(absent), Deviation(step + 1, None, rank, "the end", "the step", "", inf, last, note)
                )
    return None


def _in_microbatch(
    expected: _Expected,
    held: Mapping[int, _Trace],
    step: int,
    micro: int,
    rows: Mapping[int, Sequence[int]],
    absent: list[Deviation],
) -> Deviation | None:
    """The first event, in the reference's order, at which any rank deviates.

    What did not run on a rank is put into `absent`: it may be right (a part that these rows do not use), and counts
    only if values deviate behind it, before any that agree again.
    """
    usual = _usual_weight(held, step)
    before: dict[int, Key] = {}
    missing: dict[int, Deviation] = {}
    for key in expected.trace.keys(step):
        for rank, trace in held.items():
            if not trace.due(key):
                continue
            block = trace.micros.get((step, micro), {})
            actual = block.get(key)
            if actual is None:
                ran = key[0] in (LOSS, WEIGHT) or expected.of(step, key, rows[rank]) is not None
                if ran and trace.complete(step, micro) and rank not in missing:
                    missing[rank] = _deviation(
                        step, micro, rank, key, inf, before, trace, "it did not run here"
                    )
                continue
            mine = list(rows[rank])
            peer = next(
                other
                for peer_rank, other in held.items()
                if list(rows[peer_rank]) == mine and other.share == trace.share and other.due(key)
            )
            same = peer.micros.get((step, micro), {})
            found = _judged(expected, step, key, rows[rank], actual, usual, same)
            if isinstance(found, tuple):
                return missing.get(rank) or _deviation(
                    step, micro, rank, key, found[0], before, trace, found[1]
                )
            if found:
                missing.pop(rank, None)
            before[rank] = key
    absent.extend(missing[rank] for rank in sorted(missing))
    return None


def _judged(
    expected: _Expected,
    step: int,
    key: Key,
    rows: Sequence[int],
    actual: Values,
    usual: float,
    peer: Mapping[Key, Values],
) -> tuple[float, str] | bool:
    """The gap of one event and what to say of it; True if rows were compared and agree; False if there were none.

    peer: of a rank with the same share of the batch, maybe the same rank: their losses are one.
    """
    if key[0] == LOSS and key in peer:
        gap = max(relative_gap(a, p, 0.0) for a, p in zip(actual.ravel(), peer[key].ravel(), strict=True))
        sums = f"{actual.ravel()[0]:.12g} in place of {peer[key].ravel()[0]:.12g}"
        return False if within(gap, TRACE_TOLERANCE) else (gap, f"{sums} on the first rank with this share")
    if key[0] == WEIGHT:
        # Any common factor is a matter of the reduction; here all shares of the mean must weigh the same.
        weight, count = float(actual.ravel()[0]), _loss([expected.trace], step)[1]
        gap = relative_gap(weight, usual, 0.0)
        note = (
            f"{weight * count:.6g} / global count, where the median is {usual * count:.6g}: all must be alike"
        )
        return False if within(gap, TRACE_TOLERANCE) else (gap, note)
    reference = expected.of(step, key, rows)
    if reference is None or not len(actual):
        return False
    gap = relative_gap(actual, reference, expected.scale(step, key))
    if within(gap, TRACE_TOLERANCE):
        return True
    if actual.shape != reference.shape:
        return gap, f"{len(actual)} rows in place of {len(reference)}"
    bound = TRACE_TOLERANCE * SMALLEST_SHARE * expected.scale(step, key)
    wrong = np.flatnonzero(~(np.abs(actual - reference).max(axis=1) <= bound))
    note = f"rows {', '.join(map(str, wrong[:8].tolist()))} of the microbatch"
    if key[1] == IDS:
        note = f"row of the global batch:sample id is {_pairs(actual)} in place of {_pairs(reference)}"
    return gap, note


def _in_losses(expected: _Expected, held: Mapping[int, _Trace], step: int, last: str) -> Deviation | None:
    """Sum and count of the loss over all ranks and microbatches, if all of them came to the end."""
    if not all(step in trace.stages for trace in held.values()):
        return None
    axis = next((trace.loss for trace in held.values()), "")
    counting = [trace for trace in held.values() if trace.counts]
    actual, reference = _loss(counting, step), _loss([expected.trace], step)
    for name, a, r in zip(("the sum", "the count"), actual, reference, strict=True):
        gap = relative_gap(a, r, 0.0)
        if not within(gap, TRACE_TOLERANCE):
            note = f"{a:.12g} in place of {r:.12g}"
            return Deviation(
                step + 1, None, None, "loss", f"{name} over valid targets", axis, gap, last, note
            )
    return None


def _loss(traces: Sequence[_Trace], step: int) -> list[float]:
    pairs = [
        values.ravel()
        for trace in traces
        for (s, _), micro in trace.micros.items()
        for (kind, _, _), values in micro.items()
        if s == step and kind == LOSS
    ]
    return [float(sum(pair[0] for pair in pairs)), float(sum(pair[1] for pair in pairs))]


def _in_stages(
    expected: _Expected,
    held: Mapping[int, _Trace],
    step: int,
    last: str,
    axes: Sequence[str],
    absent: Sequence[Deviation],
) -> Deviation | None:
    """The first stage after the microbatches at which any rank deviates."""
    order = [name for kind, name, _ in expected.trace.keys(step) if kind == GRADIENT]
    place = {name: number for number, name in enumerate(order)}
    after = last
    for stage in STAGES:
        for rank, trace in sorted(held.items()):
            for line in trace.stages.get(step, []):
                if line["stage"] != stage or not line["gaps"]:
                    continue
                if (
                    stage == STAGES[0] and absent
                ):  # what the microbatches gave is wrong, and something did not run
                    return absent[0]
                gaps = {name: float(gap) for name, gap in line["gaps"].items()}
                name = min(gaps, key=lambda name: place.get(name, len(place)))
                whose = None if stage == STAGES[0] else rank
                axis = line.get("axes", {}).get(name, "×".join(axes) if stage == REDUCED else "")
                note = _stage_note(line, name)
                return Deviation(step + 1, None, whose, stage, name, axis, gaps[name], after, note)
        after = stage if stage == NORM else f"{stage} of every tensor"
    return None


def _stage_note(line: Mapping[str, Any], name: str) -> str:
    notes = [line.get("notes", {}).get(name, "")]
    if "rate" in line and line["rate"][0] != line["rate"][1]:
        notes.append(f"learning rate {line['rate'][0]:.6g} in place of {line['rate'][1]:.6g}")
    if len(line["gaps"]) > 1:
        notes.append(f"{len(line['gaps'])} tensors deviate")
    return "; ".join(note for note in notes if note)


def _deviation(
    step: int,
    micro: int,
    rank: int,
    key: Key,
    gap: float,
    before: Mapping[int, Key],
    trace: _Trace,
    note: str,
) -> Deviation:
    kind, name, call = key
    place = name if call == 0 else f"{name} (call {call + 1})"
    last = before.get(rank)
    axis = {FORWARD: trace.output.get(name, ""), LOSS: trace.loss}.get(kind, "")
    if kind == BACKWARD and last is not None:
        axis = trace.behind.get(last[1], "") if last[0] == BACKWARD else trace.loss
    after = "" if last is None else f"{last[0]} of {last[1]}"
    return Deviation(step + 1, micro, rank, kind, place, axis, gap, after, note)


def _pairs(values: Values) -> str:
    return " ".join(f"{int(row)}:{int(sample)}" for row, sample in values[:4])


def _usual_weight(held: Mapping[int, _Trace], step: int) -> float:
    """The median over ranks and microbatches of the factor that backward puts before a microbatch's loss."""
    weights = [
        float(values.ravel()[0])
        for trace in held.values()
        for (s, _), micro in trace.micros.items()
        for (kind, _, _), values in micro.items()
        if s == step and kind == WEIGHT
    ]
    return sorted(weights)[len(weights) // 2] if weights else 1.0


def _read(path: Path) -> _Trace:
    trace = _Trace()
    for line in read_lines(path):
        if "failed" in line:
            trace.failed = (line["step"], line["failed"])
        elif "counts" in line:
            trace.counts, trace.has_loss = line["counts"], line.get("loss", True)
            trace.share = line.get("share", -1)
            trace.here = frozenset(line["here"]) if line.get("here") is not None else None
            trace.output, trace.behind, trace.loss = (
                line["collectives"][k] for k in ("output", "behind", "loss")
            )
        elif "stage" in line:
            trace.stages.setdefault(line["step"], []).append(line)
        else:
            micro = trace.micros.setdefault((line["step"], line["micro"]), {})
            micro[line["kind"], line["name"], line["call"]] = np.asarray(line["values"], dtype=np.float64)
    return trace
