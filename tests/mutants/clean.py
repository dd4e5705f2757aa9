"""Runs without a fault, of layouts, models, precisions and seeds drawn at random: none may raise an alarm."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import get_args

from fourfold.launch.pool import RankPool
from fourfold.plan.run_plan import RunPlan, make_run_plan
from fourfold.spec.errors import RankFailed, SpecError
from fourfold.spec.grid import AXES, Grid
from fourfold.spec.layouts import layouts
from fourfold.spec.load import load_spec
from fourfold.spec.rules import require
from fourfold.spec.schedules import stages_in_all
from fourfold.spec.settle import data_parallel_degree
from fourfold.spec.training import CpMethod, LayoutSpec, PpSchedule
from fourfold.train.start import open_run
from tests.mutants.checks import scratch
from tests.mutants.in_rank import trained

WORLDS = (1, 2, 2, 2, 3, 3, 4, 4, 4, 8)
CUTS = (1, 2, 4)
RANKS_S = 300.0  # experts computed again by halves, on crowded cores: two minutes
PER_POOL = 8  # runs in one set of ranks

DECODERS = (
    (),
    ("model.tied=false", "model.norm=layernorm", "model.ffn=gelu"),
    ("model.heads=4", "model.kv_heads=4", "model.positions=learned", "model.max_sequence=64"),
    ("model.moe={experts=4, top_k=2, expert_width=16, balance_weight=0.1}",),
    ("model.moe={experts=4, top_k=2, shared_experts=1, expert_width=16, balance='bias'}",),
    ("model.moe={experts=4, top_k=1, expert_width=16, capacity_factor=0.8}",),
    (
        'model={kind="mlp", inputs=8, hidden=16, outputs=4, task="classification", dropout=0.1}',
        'data={kind="synthetic", samples=200}',
    ),
)
PRECISIONS = (
    ("precision.compute=fp32",),
    ("precision.compute=bf16",),
    ("precision.compute=bf16", "precision.parameters=compute", "precision.reduce=bf16"),
    ("precision.compute=fp16", "precision.scale_every=1"),
    ("precision.compute=fp16", "precision.parameters=compute"),
    ("precision.compute=fp16", f"precision.scale_start={2.0**30}"),
    ("precision.compute=fp64",),
)


@dataclass(frozen=True)
class Draw:
    """One run: what to type for it."""

    number: int
    world: int
    sets: tuple[str, ...]

    def command(self, spec: str) -> str:
        sets = " ".join(f"--set {quote(one)}" for one in self.sets)
        return f"fourfold train {spec} --nproc {self.world} {sets}"


@cache
def _legal(spec: str, world: int, sets: tuple[str, ...]) -> tuple[LayoutSpec, ...]:
    return layouts(load_spec(spec, sets).spec, world).legal


def drawn(spec: str, number: int, seed: int = 0) -> Draw:
    """The run of this number: legal by the project's own rules. Drawn again until it is."""
    draws = random.Random(f"{seed}-{number}")
    while True:
        draw = _tried(spec, number, draws)
        if draw is None:
            continue
        try:
            plan_of(spec, draw)
        except SpecError:
            continue
        return draw


def _tried(spec: str, number: int, draws: random.Random) -> Draw | None:
    world, model = draws.choice(WORLDS), draws.choice(DECODERS)
    options = (
        f'layout.cp_method="{draws.choice(get_args(CpMethod))}"',
        f'layout.pp_schedule="{draws.choice(get_args(PpSchedule))}"',
        f'layout.recompute="{draws.choice(("none", "none", "full", "selective"))}"',
    )
    rows = 4 * world
    length = () if model[0:1] and "mlp" in model[0] else ("data.sequence=32",)
    base = (*model, *length, f"batch.global_batch={rows}", "batch.micro_batch=1", "model.layers=4")
    exact = draws.random() < 0.15
    found = _legal(spec, world, (*base, *options, *(("run.exact=true",) if exact else ())))
    if not found:
        return None
    # A product of degrees first: most layouts are of few of them.
    products = sorted({tuple(getattr(layout, axis) for axis in AXES) for layout in found})
    product = draws.choice(products)
    layout = draws.choice([x for x in found if tuple(getattr(x, axis) for axis in AXES) == product])
    degree = data_parallel_degree(layout)
    cut = draws.choice(CUTS) * layout.pp
    if rows % (cut * degree):
        return None
    names = (*AXES, "ep", "zero", "sp")
    degrees = [f"layout.{name}={json.dumps(getattr(layout, name))}" for name in names]
    layers = max(2, stages_in_all(layout)) if layout.pp > 1 else draws.choice((2, 3))
    sharded = layout.zero > 0 and layout.dp_shard * layout.cp > 1
    wrap = draws.choice((1, 2)) if sharded else 1
    wrap = wrap if layout.pp == 1 else 1  # stages of one block take no more, which only a rank can tell
    extra = [
        f"layout.unused_parameters={json.dumps(draws.random() < 0.2)}",
        f"layout.bucket_mib={draws.choice((25.0, 0.02))}",
        *([f"layout.wrap={wrap}"] if sharded else []),
        *([f"layout.prefetch={draws.choice((0, 1))}"] if layout.zero == 3 and sharded else []),
        *([f'layout.offload="{draws.choice(("cpu", "disk"))}"'] if draws.random() < 0.1 else []),
        f'data.last_batch="{draws.choice(("drop", "keep"))}"',
        *([f'data.packing="{draws.choice(("pack", "pad"))}"'] if length else []),
        f"data.workers={draws.choice((0, 0, 0, 1))}",
        f'optimizer.schedule="{draws.choice(("constant", "linear", "cosine", "wsd"))}"',
        f"optimizer.warmup_steps={draws.choice((0, 2))}",
        f"optimizer.weight_decay={draws.choice((0.0, 0.1))}",
        f"optimizer.clip_norm={draws.choice((0.0, 0.1, 1.0))}",
        f"run.steps={draws.choice((3, 4))}",
        f"run.log_every={draws.choice((1, 2))}",
        f"run.check_every={draws.choice((1, 2))}",
        f"run.validate_every={draws.choice((0, 2))}",
        "run.validation_batches=1",
        f"checkpoint.every={draws.choice((0, 0, 2))}",
        f"run.seed={draws.randrange(2**31)}",
        *(["run.exact=true"] if exact else []),
    ]
    batch = (f"batch.global_batch={rows}", f"batch.micro_batch={rows // (cut * degree)}")
    model = tuple(one for one in model if not one.startswith("model.layers"))
    sets = (*model, *length, f"model.layers={layers}", *batch, *options, *degrees, *extra)
    return Draw(number, world, (*sets, *draws.choice(PRECISIONS)))


def plan_of(spec: str, draw: Draw, folder: str | None = None) -> RunPlan:
    """Its plan. Raises SpecError where a rule refuses it."""
    place = () if folder is None else (f"run.dir={json.dumps(folder)}",)
    loaded = load_spec(spec, (*draw.sets, *place), draw.world)
    plan = make_run_plan(loaded, draw.world, ("make", "mutants"))
    require(plan.spec, "train", loaded.provenance)
    return plan


def run_clean(
    spec: str, numbers: Sequence[int], results: Path, source: str, say: Callable[[str], None]
) -> None:
    """Run those numbers; a line of `results` for each: "" or the alarm, and the command that repeats it."""
    results.parent.mkdir(parents=True, exist_ok=True)
    draws = sorted((drawn(spec, number) for number in numbers), key=_shape)
    with results.open("a", encoding="utf-8") as file:
        for number, (draw, alarm) in enumerate(_told(spec, draws), 1):
            line = {"number": draw.number, "source": source, "world": draw.world, "alarm": alarm}
            file.write(json.dumps({**line, "command": draw.command(spec)}) + "\n")
            file.flush()
            say(
                f"[{number}/{len(draws)}] clean run {draw.number}, {draw.world} ranks: {alarm or 'as it should'}"
            )


def _shape(draw: Draw) -> tuple[int, str]:
    axes = (*AXES, "ep", "zero")
    return draw.world, " ".join(
        one for one in draw.sets if one.startswith(tuple(f"layout.{a}=" for a in axes))
    )


def _told(spec: str, draws: Sequence[Draw]) -> Iterator[tuple[Draw, str]]:
    """Each with its alarm. Ranks get no groups of another mesh: fresh ones are forked in between."""
    for _, same in groupby(
        draws, key=lambda draw: (draw.world, repr(Grid.of(plan_of(spec, draw).spec.layout)))
    ):
        of_shape = list(same)
        while of_shape:
            pool = RankPool(of_shape[0].world, timeout_s=RANKS_S)
            try:
                for draw in of_shape[:PER_POOL]:
                    of_shape = of_shape[1:]
                    alarm = _alarm(spec, draw, pool)
                    yield draw, alarm
                    if alarm:
                        break
            finally:
                pool.close()


def _alarm(spec: str, draw: Draw, pool: RankPool) -> str:
    with scratch() as folder:
        try:
            plan = plan_of(spec, draw, str(folder / "run"))
            room = open_run(plan, "# of make mutants\n")
            pool.run(trained, plan, str(room.path))
        except RankFailed as failure:
            problem = failure.problems[0] if not failure.told else failure.told[0]
            return f"{problem.asked}: {problem.found}"
    return ""


def read_clean(path: Path, source: str) -> dict[int, dict[str, object]]:
    """By number the newest line of these sources."""
    if not path.exists():
        return {}
    lines = (json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text.endswith("}"))
    return {line["number"]: line for line in lines if line["source"] == source}
