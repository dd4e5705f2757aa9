"""Equality: does this layout compute what one device computes?

Real ranks run the trainer's own step, in fp64 on the CPU, and compare every loss, gradient, norm and parameter with
a reference that shares nothing of that step (`reference.py`). Where something differs, both run again with every
module traced, and the first deviating value in execution order is named (`deviation.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.data.sample import Source
from fourfold.data.source import open_sources
from fourfold.launch.pool import RankPool
from fourfold.record.finding import document, verdict_of, write_findings
from fourfold.spec.errors import Problem, RankFailed, SpecError
from fourfold.spec.grid import Grid
from fourfold.spec.rules import require
from fourfold.spec.settle import data_parallel_degree, settle
from fourfold.spec.spec import Spec
from fourfold.train.setup import batch_schedule
from fourfold.verify.deviation import Deviation, first_deviation
from fourfold.verify.judge import Judge
from fourfold.verify.measure import GATE_EPS, PARAMETER_TOLERANCE, PARAMETER_TOLERANCE_OWN_EPS
from fourfold.verify.on_rank import RankGaps, measure_rank, trace_rank
from fourfold.verify.out import open_folder
from fourfold.verify.reference import Reference, run_reference
from fourfold.verify.uneven import UnevenSource, choose_salt, sharpened, with_optimizer

SCHEMA = "fourfold.verify.equal/1"
TIMEOUT_S = 600.0  # of one run on the ranks

# The share of the smallest norm seen at which clipping is set where the Spec's own bound would not act.
_CLIP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Case:
    """One layout to be judged: a settled Spec in fp64, and the data it is judged on. scratch: a folder to write in."""

    spec: Spec
    world: int
    steps: int
    source: Source
    salt: int
    scratch: Path

    def reference(self, name: str, *, steps: int | None = None, trace: Path | None = None) -> Reference:
        """The oracle's run, its files in scratch/<name>."""
        folder = self.scratch / name
        folder.mkdir()
        return run_reference(self.spec, self.source, steps or self.steps, folder, trace)

    def with_optimizer(self, **changes: float) -> _Case:
        return replace(self, spec=with_optimizer(self.spec, **changes))


class _Ranks:
    """Pools of ranks: one while all goes well, a fresh one after a rank failed."""

    def __init__(self, world: int, setup: str | None, timeout_s: float) -> None:
        self._world, self._setup, self._timeout_s = world, setup, timeout_s
        self._pool = self._make()

    def measure(self, case: _Case, reference: Reference) -> list[RankGaps]:
        return self._alive().run(measure_rank, case.spec, case.salt, reference)

    def trace(self, case: _Case, reference: Reference, folder: Path, tolerance: float) -> None:
        steps = len(reference.steps)
        self._alive().run(trace_rank, case.spec, case.salt, reference, steps, folder, tolerance)

    def close(self) -> None:
        self._pool.close()

    def _make(self) -> RankPool:
        return RankPool(self._world, timeout_s=self._timeout_s, setup=self._setup)

    def _alive(self) -> RankPool:
        if not self._pool.alive:
            self._pool = self._make()
        return self._pool


def verify_equal(
    spec: Spec,
    world: int,
    *,
    steps: int = 5,
    out: Path | None = None,
    setup: str | None = None,
    timeout_s: float = TIMEOUT_S,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compare `world` ranks with one device over `steps` optimizer steps of the Spec's own data.

    spec: settled or not. out: folder for the findings (default: the next free runs/verify-<name>-<n>).
    setup: "module:function" called in every rank first (tests plant faults with it). command: to repeat it.
    say: takes each line of the story.
    Returns the document fourfold.verify.equal/1; a rank that fails is a failed finding.
    Raises SpecError or DataError for a request or data that cannot be trained on.
    """
    if steps < 1:
        raise SpecError(
            Problem(f"--steps {steps}", "no step at all", "nothing would be compared", "--steps 5")
        )
    settled = settle(spec, world)
    require(settled, "train")
    asked, changes = sharpened(settled)
    source = open_sources(asked).train
    degree = data_parallel_degree(asked.layout)
    salt = choose_salt(source, batch_schedule(asked, len(source), degree), steps)
    folder = open_folder(out, asked.name)
    judge = Judge(command, list(changes))
    ranks = _Ranks(world, setup, timeout_s)
    say(f"one device: {steps} steps of {asked.batch.global_batch} samples in fp64")
    try:
        with tempfile.TemporaryDirectory(prefix="fourfold-reference-") as scratch:
            case = _Case(asked, world, steps, UnevenSource(source, salt), salt, Path(scratch))
            case, deviation = _compare(case, ranks, judge, say)
    finally:
        ranks.close()
    judge.sharpness(case.spec, settled)
    facts: dict[str, Any] = {
        "spec": asked.name,
        "world": world,
        "steps": steps,
        "worst_relative": judge.worst_gate,
        "worst_relative_own_eps": judge.worst_own_eps,
        "changes": judge.changes,
        "first_deviation": asdict(deviation) if deviation is not None else None,
        "layouts": [_layout_entry(case.spec, world, judge)],
        "tensors": dict(sorted(judge.tensors.items())),
    }
    path = write_findings(folder, "equal", judge.findings, SCHEMA, **facts)
    return document(SCHEMA, judge.findings, **facts, findings_file=str(path))


def _compare(
    case: _Case, ranks: _Ranks, judge: Judge, say: Callable[[str], None]
) -> tuple[_Case, Deviation | None]:
    """Both runs of the gate, and where one fails the search for the first deviation."""
    own_eps = case.spec.optimizer.eps
    case, reference = _clipping(case.with_optimizer(eps=GATE_EPS), judge)
    try:
        say("the ranks: the same steps, every value compared")
        judge.gate(ranks.measure(case, reference), reference)
        if own_eps != GATE_EPS and not judge.failed:
            say(f"both again, with AdamW's eps at {own_eps:g}")
            own = case.with_optimizer(eps=own_eps)
            reference = own.reference("own-eps")
            judge.own_eps(ranks.measure(own, reference), own_eps)
            if judge.failed:
                return case, _search(own, ranks, judge, case.steps, PARAMETER_TOLERANCE_OWN_EPS)
    except RankFailed as failure:
        judge.rank_failed(failure)
    if not judge.failed:
        return case, None
    say("it does not hold: both again, traced, to find the first deviation")
    return case, _search(case, ranks, judge, judge.first_failed_step or case.steps, PARAMETER_TOLERANCE)


def _clipping(case: _Case, judge: Judge) -> tuple[_Case, Reference]:
    """The reference, under a bound that clips in at least one step."""
    reference = case.reference("gate")
    bound = case.spec.optimizer.clip_norm
    norms = [step.norm for step in reference.steps]
    if not (0.0 < bound < max(norms) or max(norms) == 0.0):
        forced = _CLIP_SHARE * min(norm for norm in norms if norm > 0.0)
        judge.changes.append(f"optimizer.clip_norm {bound:g} -> {forced:.6g}, so that clipping acts")
        case = case.with_optimizer(clip_norm=forced)
        reference = case.reference("gate-clipped")
    judge.clipping(reference, case.spec.optimizer.clip_norm)
    return case, reference


def _search(case: _Case, ranks: _Ranks, judge: Judge, steps: int, tolerance: float) -> Deviation | None:
    """Run reference and ranks again, traced, up to the step that failed."""
    folder = case.scratch / "trace"
    folder.mkdir()
    trace = folder / "reference.jsonl"
    reference = case.reference("traced", steps=steps, trace=trace)
    with suppress(RankFailed):  # it has been reported; what the ranks wrote until then is what is looked at
        ranks.trace(case, reference, folder, tolerance)
    degree = data_parallel_degree(case.spec.layout)
    rows = batch_schedule(case.spec, len(case.source), degree).rows
    grid = Grid.of(case.spec.layout)
    axes = [axis for axis in ("dp_replicate", "dp_shard") if grid.degree(axis) > 1]
    traces = {rank: folder / f"rank{rank}.jsonl" for rank in range(degree)}
    found = first_deviation(trace, traces, rows, axes)
    judge.first_deviation(found)
    return found


def _layout_entry(spec: Spec, world: int, judge: Judge) -> dict[str, Any]:
    return {
        "world": world,
        **spec.layout.model_dump(mode="json"),
        **spec.batch.model_dump(mode="json"),
        "worst_relative": judge.worst_gate,
        "worst_relative_own_eps": judge.worst_own_eps,
        "verdict": verdict_of(judge.findings),
    }
