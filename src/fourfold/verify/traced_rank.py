"""What each rank does to find a first deviation: its steps again, everything in them written down.

Everything here that is a collective is one on all ranks: they write down the same, whichever sees a value deviate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from fourfold.parallel.apply import Parallel
from fourfold.parallel.compile import surfaces
from fourfold.record.writer import JsonLines
from fourfold.spec.grid import AXES
from fourfold.spec.spec import Spec
from fourfold.train import step as train_step
from fourfold.train.setup import Training
from fourfold.verify.boxes import Part, gradient_gaps, gradients, parameter_gaps
from fourfold.verify.measure import GRADIENT_TOLERANCE, NORM_TOLERANCE, relative_gap, within
from fourfold.verify.on_rank import opened
from fourfold.verify.reference import Reference
from fourfold.verify.trace import CLIPPED, NORM, OWN, REDUCED, UPDATED, Tracer, tracing
from fourfold.verify.uneven import Masking
from fourfold.verify.whole import NETWORK, of_spread_experts, whole_of

Array = NDArray[np.float64]


def trace_rank(
    spec: Spec,
    masking: Masking,
    reference: Reference,
    steps: int,
    folder: Path,
    parameter_tolerance: float,
) -> None:
    """Train `steps` steps, with everything each microbatch computes written to `folder`/rank<r>.jsonl.

    The first line says what this rank is. After the events of a step's microbatches come its "stage" lines, each with
    the tensors that deviate there; or one "failed" line. What a rank wrote before it was killed stays.
    Collectives: those of the trainer's step; of `whole`; and all-reduces of gradients for the diagnosis.
    """
    with opened(spec, masking) as training, JsonLines(folder / f"rank{dist.get_rank()}.jsonl") as lines:
        whole = whole_of(training.parallel, spec.layout.sp)
        parallel = training.parallel
        staged = parallel.pipeline is not None
        networks = [module.module for module in parallel.modules] if staged else [training.model]
        told = {
            "here": _here(networks, parallel) if staged or spec.layout.compile != "none" else None,
            "loss": parallel.has_loss,
            "share": parallel.share,
        }
        lines.write({"counts": parallel.counts, "collectives": asdict(whole.collectives), **told})
        with tracing(parallel.modules, networks, lines, whole, staged) as tracer:
            for step, batches in enumerate(training.loader.steps(0, steps)):
                # Where the loss is on another stage, its factor is, too.
                tracer.weight = None if parallel.has_loss else 1.0 / max(reference.steps[step].count, 1)
                try:
                    pending = train_step.agree_totals(training, batches, False)
                    train_step.accumulate(training, batches, pending)
                except Exception as error:
                    tracer.flush()
                    lines.write({"step": step, "failed": f"{type(error).__name__}: {error}"})
                    raise
                tracer.flush()
                for line in _stages(training, reference, step, tracer, parameter_tolerance):
                    lines.write({"step": step, **line})
                tracer.forget()


def _here(networks: Sequence[nn.Module], parallel: Parallel) -> list[str]:
    """Modules that are seen on this rank, and parameters; a tied one is in the last stage for its value alone."""
    names: set[str] = set()
    for place, network in enumerate(networks):
        later = parallel.pipeline is not None and parallel.pipeline.parts[place].index > 0
        idle = parallel.tied.owners if parallel.tied is not None and later else ()
        around = surfaces(network)
        seen = {name for name, module in network.named_modules() if around[module] is module}
        names |= {
            name or NETWORK for name in seen if name not in idle and (name or parallel.pipeline is None)
        }
        names |= {name for name, _ in network.named_parameters()}
    return sorted(names)


def _stages(
    training: Training, reference: Reference, step: int, tracer: Tracer, parameter_tolerance: float
) -> Iterator[dict[str, Any]]:
    """What the optimizer's half of a step does, stage by stage."""
    expected = reference.steps[step]
    own = _deviating(_own_gaps(training, reference, step, tracer), GRADIENT_TOLERANCE)
    yield {"stage": OWN, "gaps": own}
    deviating = _deviating(gradient_gaps(training, reference, step), GRADIENT_TOLERANCE)
    notes, axes = _explain(training, reference, step, _union(deviating), tracer)
    yield {"stage": REDUCED, "gaps": deviating, "notes": notes, "axes": axes}
    norm = float(train_step.clip(training))
    gap = relative_gap(norm, expected.norm, 0.0)
    yield {
        "stage": NORM,
        "gaps": {} if within(gap, NORM_TOLERANCE) else {"global norm": gap},
        "axes": {"global norm": _cutting(training)},
    }
    clip_norm = training.spec.optimizer.clip_norm
    factor = min(1.0, clip_norm / expected.norm) if clip_norm > 0 and expected.norm > 0 else 1.0
    scaled = gradient_gaps(training, reference, step, factor)
    yield {"stage": CLIPPED, "gaps": _deviating(scaled, GRADIENT_TOLERANCE)}
    rate = train_step.update(training, step)
    yield {
        "stage": UPDATED,
        "gaps": _deviating(parameter_gaps(training, reference, step), parameter_tolerance),
        "rate": [rate, expected.rate],
    }


def _own_gaps(training: Training, reference: Reference, step: int, tracer: Tracer) -> dict[str, float]:
    """Gap of each gradient as the microbatches of all ranks gave it, summed here, before the trainer reduced it.

    Collectives: an all-reduce of one number, and one of each gradient.
    """
    own = tracer.weight if training.parallel.has_loss and tracer.weight else 0.0
    weight = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(weight, op=dist.ReduceOp.MAX)
    # The trainer's factor before every loss, such as degree / count, against 1 / count.
    scale = 1.0 / max(reference.steps[step].count, 1) / (float(weight) or 1.0)
    expected, of = reference.gradients(step), reference.steps[step]
    gaps = {}
    there = training.named_parameters()
    for name, shape in zip(reference.names, reference.shapes, strict=True):
        total = _summed(training, tracer.own.get(name), shape, there.get(name))
        if name in expected:
            gaps[name] = Part.whole(total.numpy() * scale).gap(
                expected[name], of.sizes[name], of.largest_gradient
            )
        elif bool((total != 0).any()):
            gaps[name] = float("inf")
    return gaps


def _summed(training: Training, own: Tensor | None, shape: Sequence[int], parameter: Tensor | None) -> Tensor:
    """The sum over data-parallel ranks, and stages that share it, of a whole gradient of `shape`.

    Tensor-parallel peers all have it, and one counts; of experts that lie on several ranks each has a part, and all do.
    Collectives: one all-reduce on the world.
    """
    total = torch.zeros(*shape, dtype=torch.float64)
    spread = parameter is not None and of_spread_experts(parameter)
    if own is not None and (spread or training.parallel.grid.coordinate(dist.get_rank())["tp"] == 0):
        total += own
    dist.all_reduce(total)
    return total


def _explain(
    training: Training, reference: Reference, step: int, names: Sequence[str], tracer: Tracer
) -> tuple[dict[str, str], dict[str, str]]:
    """What a wrong gradient is equal to, if it is something simple; and the axes of the collectives before it.

    Collectives: three all-reduces on the world for each name.
    """
    held, expected = gradients(training), reference.gradients(step)
    shapes = dict(zip(reference.names, reference.shapes, strict=True))
    there = training.named_parameters()
    notes: dict[str, str] = {}
    axes: dict[str, str] = {}
    for name in names:
        nothing = torch.zeros(*shapes[name], dtype=torch.float64)
        mine, tail = tracer.own.get(name, nothing), tracer.last.get(name, nothing)
        all_last = _summed(training, tracer.last.get(name), shapes[name], there.get(name))
        partly, part = _of_my_peers(training, tracer.part.get(name), shapes[name])
        along = [
            axis for axis in ("dp_replicate", "dp_shard", "cp") if training.parallel.grid.degree(axis) > 1
        ]
        axes[name] = "×".join([*along, *(["tp"] if partly else [])])
        if name not in there:
            continue
        if name not in held:
            notes[name] = "this rank has no gradient where one device has one"
        elif name not in expected:
            notes[name] = "this rank has a gradient where one device has none"
        else:
            guesses = [("{} × the right one", np.asarray(expected[name]))]
            if partly:
                guesses.append(("{} × this rank's part: it was not summed over tp", part.numpy()))
            guesses += [
                ("{} × this rank's own microbatches alone: it was not reduced", mine.numpy()),
                ("{} × the last microbatch of every rank: the earlier ones were lost", all_last.numpy()),
                ("{} × this rank's last microbatch alone", tail.numpy()),
            ]
            for text, guess in guesses:
                factor = _factor(held[name], guess)
                if factor is not None:
                    notes[name] = "it is " + text.format(f"{factor:.6g}")
                    axes[name] = "tp" if "over tp" in text else axes[name]
                    break
    return notes, axes


def _of_my_peers(training: Training, part: Tensor | None, shape: Sequence[int]) -> tuple[bool, Tensor]:
    """Whether tensor-parallel ranks have parts of this gradient; and this one's, summed over data-parallel ranks.

    Collectives: one all-reduce on the world.
    """
    grid = training.parallel.grid
    at = grid.coordinate(dist.get_rank())["tp"]
    parts = torch.zeros((grid.tp + 1, *shape), dtype=torch.float64)
    if part is not None and part.shape == torch.Size(shape):
        parts[at] = part
        parts[-1] = 1.0
    dist.all_reduce(parts)
    return bool((parts[-1] > 0).any()), parts[at]


def _factor(actual: Part, guess: Array) -> float | None:
    """The number c with actual = c × guess, if there is one."""
    here = guess[actual.box.slices]
    square = float(np.vdot(here, here))
    if here.shape != actual.values.shape or not np.isfinite(square) or square == 0.0:
        return None
    factor = float(np.vdot(actual.values, here)) / square
    return factor if within(relative_gap(actual.values, factor * here, 0.0), 1e-9) else None


def _cutting(training: Training) -> str:
    """The axes over which squares are summed: those of the world, where a gradient is cut."""
    grid = training.parallel.grid
    if grid.tp == 1 and training.spec.layout.zero == 0:
        return ""
    return "×".join(axis for axis in AXES if grid.degree(axis) > 1)


def _union(gaps: Mapping[str, float]) -> list[str]:
    """Names of all ranks' gaps, in one order. Collectives: one all-gather of objects."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(gaps))
    return sorted({name for names in gathered for name in names})


def _deviating(gaps: Mapping[str, float], tolerance: float) -> dict[str, float]:
    return {name: gap for name, gap in gaps.items() if not within(gap, tolerance)}
