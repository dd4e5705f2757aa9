"""The first deviating value in execution order, from the traces of the reference and of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.record.reader import read_lines
from fourfold.verify.measure import SMALLEST_SHARE, largest, relative_gap, within
from fourfold.verify.trace import BACKWARD, BATCH, FORWARD, GRADIENT, WEIGHT

# Fingerprints are sums over a row: they carry a little more rounding than the values (5e-14 measured, honest runs).
TRACE_TOLERANCE = 1e-11

_STAGES = ("gradient", "norm", "clipped gradient", "parameter")

Key = tuple[str, str, int]  # kind, name, call
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Deviation:
    """Where a layout first leaves one device. step counts from 1, microbatch and rank from 0.

    phase: batch, forward, loss, weight of the loss, backward, gradient of a microbatch, or after the microbatches:
    gradient, norm, clipped gradient, parameter. place: the module or tensor. axis: the mesh axis whose collective
    stands between the last agreeing value and this one; "" if none does. after: that last agreeing value.
    """

    step: int
    microbatch: int | None
    rank: int
    phase: str
    place: str
    axis: str
    gap: float
    after: str
    note: str = ""

    def __str__(self) -> str:
        where = f"step {self.step}"
        if self.microbatch is not None:
            where += f", microbatch {self.microbatch}"
        text = f"{where}, rank {self.rank}: {self.phase} of {self.place}"
        if self.axis:
            text += f", after the reduction over {self.axis}"
        text += f"; gap {self.gap:.3g}"
        if self.note:
            text += f"; {self.note}"
        return f"{text}; what came before agrees ({self.after})" if self.after else text


@dataclass(slots=True)
class _Trace:
    """One file: events by (step, block or microbatch), in order; stages by step; where and why the rank raised."""

    blocks: dict[tuple[int, int], dict[Key, Values]] = field(default_factory=dict)
    stages: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    failed: tuple[int, str] | None = None

    def complete(self, step: int, micro: int) -> bool:
        """Whether the rank went beyond this microbatch: what it lacks did not run. Else it may have been killed."""
        failed_here = self.failed is not None and self.failed[0] == step
        return (step, micro + 1) in self.blocks or step in self.stages or failed_here


def first_deviation(
    reference: Path, ranks: Mapping[int, Path], degree: int, axes: Sequence[str]
) -> Deviation | None:
    """Compare the trace of each rank with the reference's, block by block, in execution order.

    ranks: data-parallel rank -> its trace. Block b of the reference is microbatch b // degree of rank b % degree.
    axes: the mesh axes over which gradients are reduced. None if nothing deviates.
    """
    expected = _read(reference)
    held = {rank: _read(path) for rank, path in ranks.items() if path.exists()}
    scales = _scales(expected)
    for step in sorted({step for step, _ in expected.blocks}):
        micros = 1 + max(block for s, block in expected.blocks if s == step) // degree
        weight = _usual_weight(held, step)
        last = ""
        for micro in range(micros):
            found = _in_microbatch(expected, held, scales, step, micro, degree, weight)
            if found is not None:
                return found
            last = f"every forward and backward up to microbatch {micro}"
        found = _in_stages(expected, held, step, last, axes)
        if found is not None:
            return found
        for rank, trace in held.items():
            if trace.failed is not None and trace.failed[0] == step:
                return Deviation(
                    step + 1, None, rank, "the end", "all microbatches", "", inf, last, trace.failed[1]
                )
    return None


def _in_microbatch(
    expected: _Trace,
    held: Mapping[int, _Trace],
    scales: Mapping[tuple[int, str, str], float],
    step: int,
    micro: int,
    degree: int,
    weight: float,
) -> Deviation | None:
    """The first event, in the reference's order, that deviates on any rank; then what only a rank has."""
    blocks = {rank: expected.blocks[step, micro * degree + rank] for rank in held}
    order = list(dict.fromkeys(key for block in blocks.values() for key in block))
    after = ""
    for key in order:
        kind, name, _ = key
        for rank, block in blocks.items():
            if key not in block:
                continue
            actual = held[rank].blocks.get((step, micro), {}).get(key)
            if actual is None and not held[rank].complete(step, micro):
                continue
            reference = block[key]
            if kind == WEIGHT:
                # Any common factor is a matter of the reduction; here all shares of the mean must weigh the same.
                reference = np.full_like(reference, weight)
            note, gap = _gap(kind, actual, reference, scales[step, kind, name])
            if not within(gap, TRACE_TOLERANCE):
                if kind == WEIGHT and actual is not None:
                    own, usual = (
                        float(w) / float(block[key].ravel()[0]) for w in (actual.ravel()[0], weight)
                    )
                    note = f"it is {own:.6g} / (global count), at the median {usual:.6g}: all must be alike"
                return _deviation(step, micro, rank, key, gap, after, note)
        after = _words(key)
    for rank, block in blocks.items():
        for key in held[rank].blocks.get((step, micro), {}):
            if key not in block:
                return _deviation(step, micro, rank, key, inf, after, "it did not run on one device")
    return None


def _gap(kind: str, actual: Values | None, reference: Values, scale: float) -> tuple[str, float]:
    if actual is None:
        return "it did not run here", inf
    gap = relative_gap(actual, reference, scale)
    if (
        within(gap, TRACE_TOLERANCE)
        or actual.shape != reference.shape
        or kind not in (BATCH, FORWARD, BACKWARD)
    ):
        return "", gap
    wrong = np.flatnonzero(
        ~(np.abs(actual - reference).max(axis=1) <= TRACE_TOLERANCE * SMALLEST_SHARE * scale)
    )
    note = f"rows {', '.join(map(str, wrong[:8].tolist()))} of the microbatch"
    if kind == BATCH and actual.shape[1] == 2:
        note += f": rows of the global batch and sample ids {_pairs(actual)} in place of {_pairs(reference)}"
    return note, gap


def _in_stages(
    expected: _Trace, held: Mapping[int, _Trace], step: int, last: str, axes: Sequence[str]
) -> Deviation | None:
    """The first stage after the microbatches at which any rank deviates."""
    order = [key[1] for block in expected.blocks.values() for key in block if key[0] == GRADIENT]
    place = {name: number for number, name in enumerate(dict.fromkeys(order))}
    after = last
    for stage in _STAGES:
        for rank, trace in held.items():
            for line in trace.stages.get(step, []):
                if line["stage"] != stage or not line["gaps"]:
                    continue
                gaps = {name: float(gap) for name, gap in line["gaps"].items()}
                name = min(gaps, key=lambda name: place.get(name, len(place)))
                note = line.get("notes", {}).get(name, "")
                if "rate" in line and line["rate"][0] != line["rate"][1]:
                    note = f"learning rate {line['rate'][0]:.6g} in place of {line['rate'][1]:.6g}"
                if len(gaps) > 1:
                    note = f"{note}; " if note else ""
                    note += f"{len(gaps)} tensors deviate"
                axis = "×".join(axes) if stage == "gradient" else ""
                phase = {"gradient": "gradient before clipping", "parameter": "update"}.get(stage, stage)
                return Deviation(step + 1, None, rank, phase, name, axis, gaps[name], after, note)
        after = stage
    return None


def _deviation(step: int, micro: int, rank: int, key: Key, gap: float, after: str, note: str) -> Deviation:
    kind, name, call = key
    phase = "gradient of a microbatch" if kind == GRADIENT else kind
    place = name if call == 0 else f"{name} (call {call + 1})"
    return Deviation(step + 1, micro, rank, phase, place, "", gap, after, note)


def _words(key: Key) -> str:
    kind, name, _ = key
    return f"{kind} of {name}"


def _pairs(values: Values) -> str:
    return "[" + ", ".join(f"{int(row)}:{int(sample)}" for row, sample in values[:4]) + "]"


def _usual_weight(held: Mapping[int, _Trace], step: int) -> float:
    """The median over ranks and microbatches of the weight that backward gives a microbatch's loss."""
    weights = [
        float(values.ravel()[0])
        for trace in held.values()
        for (s, _), block in trace.blocks.items()
        for (kind, _, _), values in block.items()
        if s == step and kind == WEIGHT
    ]
    return sorted(weights)[len(weights) // 2] if weights else 1.0


def _scales(expected: _Trace) -> dict[tuple[int, str, str], float]:
    """What a gap is judged against, by step, kind and name, as `relative_gap` takes it: the largest of the kind.

    For modules: of the same module over all blocks, in full, as what is near zero in one block (a masked row) is
    not in another. For gradients: of all parameters.
    """
    found: dict[tuple[int, str, str], float] = {}
    kinds: dict[tuple[int, str], float] = {}
    for (step, _), block in expected.blocks.items():
        for (kind, name, _), values in block.items():
            size = largest([values])
            found[step, kind, name] = max(found.get((step, kind, name), 0.0), size)
            kinds[step, kind] = max(kinds.get((step, kind), 0.0), size)
    return {
        (step, kind, name): kinds[step, kind] if kind == GRADIENT else size / SMALLEST_SHARE
        for (step, kind, name), size in found.items()
    }


def _read(path: Path) -> _Trace:
    trace = _Trace()
    for line in read_lines(path):
        if "failed" in line:
            trace.failed = (line["step"], line["failed"])
        elif "stage" in line:
            trace.stages.setdefault(line["step"], []).append(line)
        else:
            block = trace.blocks.setdefault((line["step"], line["micro"]), {})
            block[line["kind"], line["name"], line["call"]] = np.asarray(line["values"], dtype=np.float64)
    return trace


def paths_of(folder: Path) -> Iterator[tuple[int, Path]]:
    """The ranks' traces in a folder."""
    for path in sorted(folder.glob("rank*.jsonl")):
        yield int(path.stem.removeprefix("rank")), path
