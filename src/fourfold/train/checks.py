"""Checks of every step, made before its update: a value that is not finite, or a wrong count, reaches no parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from fourfold.collectives.sums import start_sum
from fourfold.data.batch import Batch
from fourfold.spec.errors import CheckFailed, Problem
from fourfold.train.scaler import Scaled
from fourfold.train.setup import Training
from fourfold.train.step import LossPair

TOLERANCE = 1e-3  # of norms of the same gradients: rounding of their sum, in fp32 or wider
SCALED_TOLERANCE = (
    0.1  # of norms under two loss scales: what vanishes under the lower one; a lost scale is 1.0
)


class NonFinite(CheckFailed):
    """A loss or a gradient is not a finite number."""

    def __init__(self, problems: Problem, secondary: bool = False) -> None:
        super().__init__(problems)
        self.secondary = secondary


def check_step(training: Training, batches: Sequence[Batch], pair: LossPair, norm: Tensor) -> None:
    """Refuse a loss or a global gradient norm that is not finite, and a loss over other targets than the batches'.

    Done here on a CPU, where reading a value waits for nothing; on another device `check_line` does it at the next
    logging step. Under loss scaling the update is skipped instead, as long as the scale can be taken back.
    Collectives: only where the norm is not finite, which all ranks see alike: one small sum.
    Raises NonFinite, which names the rank it came from, or CheckFailed.
    """
    step, scale = batches[0].step + 1, training.scale
    if scale.skips and scale.backed_off < 1:
        _check_finite(training, step, float(pair.sum), float("nan"))
    if training.device.type == "cpu":
        if scale.dynamic and not scale.skips and not math.isfinite(float(norm)):
            raise CheckFailed(
                _decided_alone(step, f"a global gradient norm of {float(norm)}, and no skip here")
            )
        if not scale.skips:
            _check_finite(training, step, float(pair.sum), float(norm))
        if training.parallel.has_loss:
            _check_count(step, sum(batch.valid_count() for batch in batches), int(pair.count))


def check_line(line: dict[str, float], targets: int) -> None:
    """The same of one line of metrics, summed over ranks. targets: valid ones the step was divided by."""
    step = int(line["step"])
    skipped = bool(line.get("skipped", 0))
    if not skipped and not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])):
        raise NonFinite(_not_finite(step, f"loss {line['loss']}, gradient norm {line['grad_norm']}"))
    _check_count(step, targets, int(line["loss_tokens"]))


def _check_finite(training: Training, step: int, loss: float, size: float) -> None:
    own = not math.isfinite(loss)
    if math.isfinite(size):
        if own:
            raise NonFinite(_not_finite(step, f"a loss sum of {loss} on this rank"))
        return
    # The norm is the same on every rank, so all of them are here.
    rank = training.joined.rank
    origins = start_sum([int(own and one == rank.rank) for one in range(rank.world)]).wait()
    named = ", ".join(str(one) for one, flag in enumerate(origins) if flag)
    if named:
        found = f"the loss is not finite on rank {named}"
    else:
        found = "every rank's loss is finite; the gradient overflowed in backward"
    secondary = bool(named) and not own
    if training.scale.skips:
        raise NonFinite(_scale_used_up(step, training.scale.value, found), secondary)
    raise NonFinite(_not_finite(step, f"gradient norm {size}: {found}"), secondary)


def _not_finite(step: int, found: str) -> Problem:
    return Problem(
        asked=f"a finite loss and gradient in step {step}",
        found=found,
        why="one such update makes every parameter it touches useless",
        instead="lower optimizer.lr, or look at the samples: fourfold replay on the failure bundle shows the module",
    )


def _scale_used_up(step: int, scale: float, found: str) -> Problem:
    return Problem(
        asked=f"a finite gradient in step {step}, in fp16 under a loss scale of 1 or more",
        found=f"the scale is {scale:g}, and still {found}",
        why="a smaller scale helps only against an overflow that the scale itself makes; this one comes from the model",
        instead="--set precision.compute=bf16 or --set precision.compute=fp32, or a lower optimizer.lr",
    )


def _decided_alone(step: int, found: str) -> Problem:
    return Problem(
        asked=f"one loss scale on all ranks in step {step}, and an update on all of them or on none",
        found=found,
        why="a rank that overflows alone, and decides alone, has other parameters, moments and gradients than the "
        "others from then on",
        instead="decide by what all ranks found, as LossScale.unscale does",
    )


def _check_count(step: int, targets: int, counted: int) -> None:
    if counted != targets:
        raise CheckFailed(
            Problem(
                asked=f"the loss of step {step} over {targets} valid targets",
                found=f"the model's loss counted {counted}",
                why="the gradient was divided by the batch's count: it is off by the ratio of the two",
                instead="let the model's loss count the same targets as batch.valid (see docs/own_model.md)",
            )
        )


def check_scales(step: int, own: Scaled, summed: Sequence[float]) -> None:
    """Under loss scaling all ranks scale, and skip, alike. summed: scale and skips over all ranks.

    Collectives: none. Raises CheckFailed, on every rank.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    scales, skips = summed
    if scales == world * own.scale and skips in (0, world):
        return
    found = (
        f"{skips:g} of {world} ranks skipped; the scale is {own.scale:g} here, {scales / world:g} on average"
    )
    raise CheckFailed(_decided_alone(step, found))


def check_masters(training: Training) -> None:
    """Refuse parameters, frozen ones too, in any dtype but the run's own, which is fp32, or fp64 in fp64.

    In a narrow one most updates are below its spacing: they are rounded away, and so are moments.
    Collectives: none. Raises CheckFailed naming them.
    """
    odd = {
        name: p.dtype
        for name, p in training.named_parameters().items()
        if p.is_floating_point() and p.dtype != training.dtype
    }
    if odd:
        names = list(odd)
        raise CheckFailed(
            Problem(
                asked=f"parameters and moments in {training.dtype}, whatever precision.compute is",
                found=f"{odd[names[0]]} in {', '.join(names[:5])}"
                + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
                why="an update is often smaller than the spacing of narrow numbers: it is rounded away, and nothing "
                "trains; squares of small gradients become 0 in fp16, and updates infinite",
                instead=f"no .half() or .bfloat16() on the model: --set precision.compute={_narrow(training)} narrows "
                "what may be narrow",
            )
        )


def check_clipped(training: Training, norm: Tensor) -> None:
    """After `clip`, which gave `norm`: gradients are as long as they should be, at most `optimizer.clip_norm`.

    Collectives: those of the norm. Raises CheckFailed, on every rank alike.
    """
    before, bound = float(norm), training.spec.optimizer.clip_norm
    expected = min(before, bound) if bound > 0 else before
    found = float(training.parallel.norm(list(training.model.parameters()), training.device))
    if math.isfinite(before) and abs(found - expected) > TOLERANCE * expected:
        raise CheckFailed(
            Problem(
                asked=f"gradients of norm {expected:.6g} after clipping at optimizer.clip_norm = {bound:g}",
                found=f"a norm of {found:.6g}: {found / expected if expected else math.inf:.3g} × that",
                why="the order is scale, backward, unscale, clip, update: what is clipped before it is unscaled is "
                "held against a bound for other numbers, and then divided by the loss scale",
                instead="clip after accumulate(), which unscales",
            )
        )


def check_unscaled(training: Training, norms: Sequence[Tensor]) -> None:
    """The same batch under several loss scales: `norms` of its gradients must be equal. Raises CheckFailed."""
    found = [float(norm) for norm in norms]
    if not all(map(math.isfinite, found)) or max(found) <= (1 + SCALED_TOLERANCE) * min(found):
        return
    scales = " and ".join(f"{trial.value:g}" for trial in training.scale.trials())
    raise CheckFailed(
        Problem(
            asked=f"the same gradients under loss scales {scales}",
            found=f"norms of {' and '.join(f'{one:.6g}' for one in found)}",
            why="a scale that stays in the gradients moves clipping, the recorded norm and AdamW's eps with it",
            instead="divide all gradients by the scale once, before anything looks at them: accumulate() does",
        )
    )


def _narrow(training: Training) -> str:
    asked = training.spec.precision.compute
    return asked if asked in ("bf16", "fp16") else "bf16"
