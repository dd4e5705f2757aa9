"""What each rank does in the precision exercise: the product's own loop, and mistakes as they are found in the wild.

The mistakes are put in the place of the product's functions, in a process that ends with the exercise. Each is run
twice: step by step without a check, to see what comes of it, and in the product's own loop, to see who says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.collectives.sums import start_sum, sum_floats
from fourfold.launch.stop import StopRequest
from fourfold.models.registry import kit_for
from fourfold.parallel.clip import local
from fourfold.plan.run_plan import RunPlan
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import CheckFailed, Problem
from fourfold.spec.spec import Spec
from fourfold.train import loop, setup, step
from fourfold.train.scaler import LossScale
from fourfold.train.setup import Training, no_beat, open_training
from fourfold.train.step import PendingTotals, agree_totals
from fourfold.verify.here import joined_here

INF_STEP = 3  # from 0: the step in which a gradient of one rank is not finite
INF_RANK = 1


def course(plan: RunPlan, run: Path, mistake: str) -> None:
    """Train as planned in the product's own loop, with a mistake in it ("": none). Its story goes to the log."""
    with redirect_stderr(StringIO()), MISTAKES[mistake]():
        loop.train(plan, joined_here(), RunDir(run), StopRequest(), no_beat)


def refused(plan: RunPlan, run: Path, mistake: str) -> str:
    """What `course` says to it, "" if it trains to the end. With others the error goes on: they would wait for ever."""
    try:
        course(plan, run, mistake)
    except CheckFailed as error:
        if dist.get_world_size() > 1:
            raise
        return in_words(error.problems[0])
    return ""


def in_words(problem: Problem) -> str:
    """What a check asked for, and found."""
    return f"asked for {problem.asked}; found {problem.found}"


def held(plan: RunPlan, tokens: int) -> dict[str, Any]:
    """Bytes after one step, by what they are for, and the gradient of the first microbatch in a batch of `tokens`.

    "kept" is what its forward keeps for its backward, parameters left out. gradient: fp64 [parameters].
    """
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with open_training(plan.spec, joined_here()) as training:
        batches = next(training.loader.steps(0, 1))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            step.accumulate(training, batches[:1], PendingTotals(start_sum([tokens, 0, 0])))
        gradient = torch.cat(
            [p.grad.flatten().double() for _, p in _trained(training) if p.grad is not None]
        ).cpu()
        training.optimizer.drop_gradients()
        own = {p.untyped_storage().data_ptr() for p in training.model.parameters()}
        step.accumulate(training, batches, agree_totals(training, batches, False))
        step.update(training, 0)
        moments = [
            one for name, _ in _trained(training) for one in training.optimizer.state_of(name).values()
        ]
        return {
            "parameters": _bytes(training.model.parameters()),
            "moments": _bytes(one for one in moments if one.ndim),
            "kept": sum(size for at, size in kept.items() if at not in own),
            "gradient": gradient,
        }


def by_hand(plan: RunPlan, steps: int, mistake: str) -> dict[str, Any]:
    """The first `steps` steps without a check, with a mistake ("": none).

    Returns by step the loss, the norm that `clip` gives, the norm of what it leaves, the scale, whether this rank
    skipped, and the share of its elements that an update moved; at the end AdamW's count, and whether all is finite.
    """
    seen: dict[str, Any] = {key: [] for key in ("loss", "norm", "clipped", "scale", "skipped", "moved")}
    with MISTAKES[mistake](), open_training(plan.spec, joined_here()) as training:
        for number, batches in enumerate(training.loader.steps(0, steps)):
            pair, totals = step.accumulate(training, batches, agree_totals(training, batches, False))
            seen["loss"].append(float(sum_floats(pair.sum)) / totals.count)
            seen["norm"].append(float(step.clip(training)))
            seen["clipped"].append(
                float(training.parallel.norm(list(training.model.parameters()), training.device))
            )
            before = [local(p).clone() for _, p in _trained(training)]
            step.update(training, number)
            moved = sum(
                int((local(p) != was).sum()) for (_, p), was in zip(_trained(training), before, strict=True)
            )
            seen["moved"].append(moved / max(sum(was.numel() for was in before), 1))
            seen["scale"].append(training.scale.last.scale)
            seen["skipped"].append(training.scale.last.skipped)
        states = [training.optimizer.state_of(name) for name, _ in _trained(training)]
        seen["updates"] = max((int(state["step"]) for state in states if state), default=0)
        seen["finite"] = all(bool(local(p).isfinite().all()) for _, p in _trained(training))
    return seen


@contextmanager
def clip_before_unscale() -> Iterator[None]:
    """Gradients are clipped as backward left them, and divided by the scale afterwards."""
    keep = step.clip

    def clip(training: Training) -> Tensor:
        norm = keep(training)
        held = [local(p.grad) for p in training.model.parameters() if p.grad is not None]
        _unscale(training.scale, held, training.parallel.loss_factor)
        return norm

    with (
        patch.object(LossScale, "unscale", lambda *_: None),
        patch.object(step, "clip", clip),
        patch.object(loop, "clip", clip),
    ):
        yield


@contextmanager
def half_everything() -> Iterator[None]:
    """The whole model is narrow: what is updated, its moments and its gradients are fp16, without a scale."""

    def halved(spec: Spec) -> Any:
        kit: Any = kit_for(spec)
        build = kit.build
        kit.build = lambda seed, dtype: build(seed, dtype).half()
        return kit

    with patch.object(setup, "kit_for", halved), patch.object(LossScale, "unscale", lambda *_: None):
        yield


@contextmanager
def inf_on_one_rank() -> Iterator[None]:
    """No mistake, but an accident: after backward one element of one rank's share of the gradient is infinite."""
    with patch.object(LossScale, "unscale", _after_accident(LossScale.unscale)):
        yield


@contextmanager
def each_rank_alone() -> Iterator[None]:
    """The same accident, and each rank decides by its own share."""
    with patch.object(LossScale, "unscale", _after_accident(_unscale)):
        yield


MISTAKES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": nullcontext,
    "clip-before-unscale": clip_before_unscale,
    "half-everything": half_everything,
    "inf-on-one-rank": inf_on_one_rank,
    "each-rank-alone": each_rank_alone,
}


def _unscale(scale: LossScale, gradients: Sequence[Tensor], factor: float = 1.0) -> None:
    """Asks nobody."""
    for gradient in gradients:
        gradient.mul_(factor / scale.value)
    scale.skips = not all(bool(gradient.isfinite().all()) for gradient in gradients)


def _after_accident(unscale: Any) -> Any:
    """`unscale` where the accident happens."""
    steps: dict[LossScale, int] = {}  # those that are tried before the first step have scales of their own

    def planted(scale: LossScale, gradients: Sequence[Tensor], factor: float = 1.0) -> None:
        number = steps[scale] = steps.get(scale, -1) + 1
        if number == INF_STEP and dist.get_rank() == INF_RANK:
            gradients[-1].view(-1)[0] = math.inf
        unscale(scale, gradients, factor)

    return planted


def _trained(training: Training) -> list[tuple[str, nn.Parameter]]:
    return list(training.optimizer.trained.items())


def _bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
