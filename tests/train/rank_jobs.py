"""What the tests of this room run in ranks, and the small Specs they run."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fourfold.data.loader import validation_batches
from fourfold.launch.stop import StopRequest
from fourfold.plan.run_plan import RunPlan, make_run_plan
from fourfold.record.run_dir import RunDir
from fourfold.spec.errors import FourfoldError
from fourfold.spec.load import load_spec
from fourfold.spec.settle import settle
from fourfold.spec.spec import Spec
from fourfold.train import loop, recorder, story
from fourfold.train.checks import check_step
from fourfold.train.setup import open_training
from fourfold.train.step import accumulate, agree_totals, clip, update
from fourfold.train.validation import validate
from fourfold.verify.here import joined_here

SMALLEST = (
    'model.kind="mlp"',
    "model.inputs=4",
    "model.hidden=8",
    'data.kind="synthetic"',
    "data.samples=40",
    "batch.global_batch=8",
    "batch.micro_batch=2",
    "optimizer.warmup_steps=0",
    "run.steps=4",
    "run.log_every=2",
    "run.validate_every=0",
    'precision.compute="fp64"',
)


def spec(world: int, *sets: str) -> Spec:
    return settle(load_spec("tiny", [*SMALLEST, *sets]).spec, world)


def plan(world: int, *sets: str) -> RunPlan:
    return make_run_plan(load_spec("tiny", [*SMALLEST, *sets]), world, ("test",))


def few_steps(steps: int, *sets: str) -> dict[str, Any]:
    """Losses, norms, rates and final parameters of `steps` steps on this world, as plain numbers."""
    seen: dict[str, Any] = {"loss": [], "norm": [], "rate": [], "ids": []}
    with open_training(spec(dist.get_world_size(), *sets), joined_here()) as training:
        for step, batches in enumerate(training.loader.steps(0, steps)):
            pair, totals = accumulate(training, batches, agree_totals(training, batches, False))
            total = pair.sum.clone()
            dist.all_reduce(total)
            seen["loss"].append(float(total) / totals.count)
            seen["norm"].append(float(clip(training)))
            seen["rate"].append(update(training, step))
            seen["ids"].append([i for batch in batches for i in batch.sample_ids.tolist()])
        seen["parameters"] = {n: p.flatten().tolist() for n, p in training.named_parameters().items()}
        found = validate(training, steps)
        seen["validation"] = None if found is None else (found.loss, found.targets, found.samples)
    return seen


def validation(*sets: str) -> dict[str, Any]:
    """A validation pass after the fourth step, and the same by hand: one sample at a time, dropout off."""
    phases: set[tuple[int, str]] = set()
    asked = settle(load_spec("tiny", sets).spec, dist.get_world_size())
    with open_training(asked, joined_here(), beat=lambda *phase: phases.add(phase)) as training:
        found = validate(training, 3)
        assert found is not None
        again = training.model.training
        source = training.sources.validation
        assert source is not None
        training.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for batch in validation_batches(source, 1, 1, 0, asked.run.seed):
                pair = training.loss_module(batch.to(training.device, training.dtype))
                sums += torch.stack([part.double() for part in pair])
        return {
            "loss": found.loss,
            "targets": found.targets,
            "samples": found.samples,
            "by_hand": float(sums[0] / sums[1]),
            "targets_by_hand": int(sums[1]),
            "all_samples": len(source),
            "training_again": again,
            "phases": phases,
        }


def one_update(*sets: str) -> dict[str, Any]:
    """The second step, in its parts: gradients before and after clipping, what is left after the update, reductions."""
    reductions: list[int] = []

    def averaged(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
        reductions.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    with open_training(spec(dist.get_world_size(), *sets), joined_here()) as training:
        assert isinstance(training.parallel.module, DistributedDataParallel)
        training.parallel.module.register_comm_hook(None, averaged)
        batches = next(training.loader.steps(1, 2))
        pair, _ = accumulate(training, batches, agree_totals(training, batches, False))
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        before = [g.clone() for g in gradients]
        norm = float(clip(training))
        return {
            "loss_dtype": pair.sum.dtype,
            "microbatches": len(batches),
            "reductions": reductions,
            "norm": norm,
            "factors": [float((after / g).nanmean()) for after, g in zip(gradients, before, strict=True)],
            "rate": update(training, 1),
            "left": sum(p.grad is not None for p in training.model.parameters()),
        }


def wish_to_stop(who: int) -> list[bool]:
    """What each of three steps' totals says when rank `who` wishes to stop in the second."""
    told = []
    with open_training(spec(dist.get_world_size()), joined_here()) as training:
        for step, batches in enumerate(training.loader.steps(0, 3)):
            wish = step == 1 and dist.get_rank() == who
            told.append(agree_totals(training, batches, wish).wait().stop)
    return told


def nonfinite(where: str) -> tuple[str, bool]:
    """Error text and `secondary` when rank 1's loss ("loss") or every rank's gradient ("gradient") is not finite."""
    with open_training(spec(dist.get_world_size()), joined_here()) as training:
        batches = next(training.loader.steps(0, 1))
        if where == "loss" and dist.get_rank() == 1:
            batches[0].inputs[0, 0] = float("nan")
        pair, _ = accumulate(training, batches, agree_totals(training, batches, False))
        if where == "gradient":
            next(training.model.parameters()).grad[0] = float("inf")  # type: ignore[index]
        try:
            check_step(training, batches, pair, clip(training))
        except FourfoldError as error:
            return str(error), error.secondary
    return "", False


class Line(torch.nn.Module):
    """A line that takes features in the run's own dtype. off: targets that its loss leaves out. idle: one more layer,
    which takes no part."""

    def __init__(self, off: int = 0, wide: int = 1, idle: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, wide)
        self.idle = torch.nn.Linear(4, 1) if idle else None
        self.off = off

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        error = (self.linear(batch.inputs).mean(-1, keepdim=True) - batch.targets).square().mean(-1)
        return torch.where(batch.valid, error, 0.0).sum(), batch.valid.sum() - self.off


def line(*sets: str) -> tuple[str, ...]:
    """What makes `tiny` a Spec of `Line`."""
    return (
        'model={kind="import", target="tests.train.rank_jobs:Line"}',
        *(setting for setting in SMALLEST if setting.startswith(("batch", "optimizer", "run", "precision"))),
        *('data.kind="synthetic"', "data.samples=40", "data.inputs=4", "data.outputs=1"),
        'data.task="regression"',
        *sets,
    )


def bundle_of_a_miscounting_run(folder: str) -> str:
    """The bundle that a run leaves whose loss counts one target less."""
    asked = make_run_plan(load_spec("tiny", line("model.args.off=1")), dist.get_world_size(), ("test",))
    with StopRequest() as stop:
        try:
            loop.train(asked, joined_here(), RunDir(Path(folder)), stop, lambda *_: None)
        except FourfoldError as error:
            return str(error)
    return ""


def idle_layer() -> str:
    """The text of what stops a step in which a layer took no part on any rank, though the Spec says that all do."""
    asked = settle(load_spec("tiny", line("model.args.idle=true")).spec, dist.get_world_size())
    with open_training(asked, joined_here()) as training:
        batches = next(training.loader.steps(0, 1))
        try:
            accumulate(training, batches, agree_totals(training, batches, False))
        except FourfoldError as error:
            return str(error)
    return ""


def wrong_count() -> str:
    """The text of what stops a step whose loss counted one target less than the batches hold."""
    with open_training(spec(dist.get_world_size()), joined_here()) as training:
        batches = next(training.loader.steps(0, 1))
        pair, _ = accumulate(training, batches, agree_totals(training, batches, False))
        try:
            check_step(training, batches, replace(pair, count=pair.count - 1), clip(training))
        except FourfoldError as error:
            return str(error)
    return ""


def census_of_different_seeds() -> str:
    try:
        with open_training(spec(dist.get_world_size(), f"run.seed={dist.get_rank()}"), joined_here()):
            return ""
    except FourfoldError as error:
        return str(error)


def different_parameters() -> str:
    """The census where one rank's initial parameters differ by one bit, with equal Specs."""
    from fourfold.train import setup

    before = setup.kit_for

    def kit_for(asked: Spec) -> Any:
        kit = before(asked)
        build = kit.build

        def changed(seed: int, dtype: torch.dtype) -> torch.nn.Module:
            model = build(seed, dtype)
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-16 + 1e-12 * dist.get_rank()
            return model

        kit.build = changed
        return kit

    setup.kit_for = kit_for
    try:
        with open_training(spec(dist.get_world_size()), joined_here()):
            return ""
    except FourfoldError as error:
        return str(error)
    finally:
        setup.kit_for = before


def whole_run(folder: str, *sets: str) -> str:
    run = RunDir(Path(folder))
    with StopRequest() as stop:
        return loop.train(plan(dist.get_world_size(), *sets), joined_here(), run, stop, lambda *_: None)


def told_run(folder: str, *sets: str) -> str:
    """A run in which no silence is short enough."""
    with patch.object(story, "QUIET_S", -1.0):
        return whole_run(folder, *sets)


def clock_calls(folder: str) -> list[str]:
    """What a run with a validation after its second step tells the clock of its rates."""
    told: list[str] = []
    keep = recorder.Meter

    class Noted(keep):  # type: ignore[misc, valid-type]
        def restart_clock(self) -> None:
            told.append("restart")

        def add(self, step: int, *rest: Any) -> None:
            told.append(f"step {step}")
            super().add(step, *rest)

        def leave_out(self, seconds: float) -> None:
            told.append("leave out" if seconds > 0 else "leave out nothing")

    recorder.Meter = Noted  # type: ignore[misc]
    try:
        whole_run(folder, "run.validate_every=2", "run.steps=3")
    finally:
        recorder.Meter = keep  # type: ignore[misc]
    return told


def stopped_run(folder: str) -> tuple[str, int]:
    """How a run ends that this rank, if it is rank 1, wishes to stop from the start; and after how many steps."""
    with StopRequest() as stop:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        ending = loop.train(
            plan(dist.get_world_size()), joined_here(), RunDir(Path(folder)), stop, lambda *_: None
        )
    return ending, sum(event["kind"] == "step" for event in events(folder, dist.get_rank()))


def run_with_nan(folder: str, *sets: str) -> str:
    """A run whose third batch holds a NaN on rank 0; the text of what ends it."""
    keep = loop.accumulate

    def poisoned(training: Any, batches: Any, pending: Any) -> Any:
        if batches[0].step == 2 and dist.get_rank() == 0:
            batches[0].inputs[0, 0] = float("nan")
        return keep(training, batches, pending)

    loop.accumulate = poisoned
    try:
        whole_run(folder, *sets)
    except FourfoldError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    finally:
        loop.accumulate = keep
    return ""


def warm_up_a_batch_norm() -> tuple[bool, bool]:
    """Whether running statistics are as before the mock batch, and no gradient is left."""
    with open_training(spec(dist.get_world_size()), joined_here()) as training:
        norm = torch.nn.BatchNorm1d(4, dtype=torch.float64)
        first = next(module for module in training.model.modules() if isinstance(module, torch.nn.Linear))
        first.register_forward_pre_hook(lambda _, inputs: (norm(inputs[0]),))
        training.model.add_module("statistics", norm)
        before = [buffer.clone() for buffer in norm.buffers()]
        norm(torch.ones(2, 4, dtype=torch.float64))
        moved = [buffer.clone() for buffer in norm.buffers()]
        for buffer, value in zip(norm.buffers(), before, strict=True):
            buffer.copy_(value)
        assert not all(torch.equal(one, other) for one, other in zip(before, moved, strict=True))
        norm.requires_grad_(False)
        loop.warm_up(training)
        same = all(torch.equal(one, other) for one, other in zip(norm.buffers(), before, strict=True))
        return same, all(parameter.grad is None for parameter in training.model.parameters())


def events(folder: str, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunDir(Path(folder)).events(rank).read_text().splitlines()]


def slowly(sample: Any, generator: Any) -> Any:
    """A transform that adds noise, slowly."""
    time.sleep(0.02)
    return replace(
        sample,
        inputs=sample.inputs + generator.normal(0.0, 0.1, sample.inputs.shape).astype(sample.inputs.dtype),
    )
