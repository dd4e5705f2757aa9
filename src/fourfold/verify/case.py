"""One layout to be judged, the ranks that run it, and the search for where it first deviates."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fourfold.data.sample import Source
from fourfold.launch.pool import RankPool
from fourfold.spec.errors import RankFailed
from fourfold.spec.grid import Grid
from fourfold.spec.spec import Spec
from fourfold.train.setup import batch_schedule
from fourfold.verify.deviation import Deviation, first_deviation
from fourfold.verify.judge import Judge
from fourfold.verify.on_rank import RankGaps, measure_rank
from fourfold.verify.reference import Reference, run_reference
from fourfold.verify.traced_rank import trace_rank
from fourfold.verify.uneven import Masking, with_optimizer

TIMEOUT_S = 600.0  # of one run on the ranks

# The share of the smallest norm seen at which clipping is set where the Spec's own bound would not act.
_CLIP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """A settled Spec in fp64, and the data it is judged on. scratch: a folder to write in."""

    spec: Spec
    world: int
    steps: int
    source: Source
    masking: Masking
    scratch: Path

    def reference(self, name: str, *, steps: int | None = None, trace: Path | None = None) -> Reference:
        """The oracle's run, its files in scratch/<name>."""
        folder = self.scratch / name
        folder.mkdir()
        return run_reference(self.spec, self.source, steps or self.steps, folder, trace)

    def at(self, scratch: Path) -> Case:
        return replace(self, scratch=scratch)

    def with_optimizer(self, **changes: float) -> Case:
        return replace(self, spec=with_optimizer(self.spec, **changes))


class Ranks:
    """Pools of ranks: one while all goes well, a fresh one after a rank failed."""

    def __init__(self, world: int, setup: str | None, timeout_s: float, device: str = "cpu") -> None:
        self._world, self._setup, self._timeout_s, self._device = world, setup, timeout_s, device
        self._pool = self._make()

    def measure(self, case: Case, reference: Reference) -> list[RankGaps]:
        return self._alive().run(measure_rank, case.spec, case.masking, reference)

    def trace(self, case: Case, reference: Reference, folder: Path, tolerance: float) -> None:
        steps = len(reference.steps)
        self._alive().run(trace_rank, case.spec, case.masking, reference, steps, folder, tolerance)

    def close(self) -> None:
        self._pool.close()

    def _make(self) -> RankPool:
        return RankPool(self._world, timeout_s=self._timeout_s, setup=self._setup, device=self._device)

    def _alive(self) -> RankPool:
        if not self._pool.alive:
            self._pool = self._make()
        return self._pool


def clipping(case: Case, judge: Judge) -> tuple[Case, Reference]:
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


def search(
    case: Case,
    ranks: Ranks,
    steps: int,
    tolerance: float,
    name: str = "trace",
    traced: tuple[Reference, Path] | None = None,
) -> Deviation | None:
    """Run reference and ranks again, traced, up to the step that failed.

    name: of the folder in scratch. traced: the reference with its trace, where there is one.
    """
    folder = case.scratch / name
    folder.mkdir()
    reference, trace = traced or traced_reference(case, steps, name)
    with suppress(RankFailed):  # it has been reported; what the ranks wrote until then is what is looked at
        ranks.trace(case, reference, folder, tolerance)
    grid = Grid.of(case.spec.layout)
    schedule = batch_schedule(case.spec, len(case.source), grid.degree("dp"))
    axes = [axis for axis in ("dp_replicate", "dp_shard", "cp") if grid.degree(axis) > 1]
    traces = {rank: folder / f"rank{rank}.jsonl" for rank in range(grid.world)}
    return first_deviation(
        trace, traces, lambda rank, micro: schedule.rows(grid.index(rank, "dp"), micro).tolist(), axes
    )


def traced_reference(case: Case, steps: int, name: str) -> tuple[Reference, Path]:
    """The oracle's run with everything it computes written down."""
    trace = case.scratch / f"{name}-reference.jsonl"
    return case.reference(f"{name}-reference", steps=steps, trace=trace), trace
