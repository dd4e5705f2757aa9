"""The classic mistakes of narrow precision: what each does where nobody checks, and what catches it."""

from __future__ import annotations

import math

from fourfold.lab import precision_ranks as ranks
from fourfold.lab.precision_exercise import FP16, UNSCALED, Lab, Shown, losses
from fourfold.lab.precision_ranks import INF_RANK, INF_STEP
from fourfold.record.reader import RunReader

STEPS = 20  # of a mistake on one rank
STEPS_OF_TWO = 6  # of one on two
TWO = ("layout.zero=2", f"run.steps={STEPS_OF_TWO}")  # each rank has its own share of the gradient


def clip_before_unscale(lab: Lab) -> Shown:
    """The bound is held against scaled gradients."""
    shown = Shown(
        "clip-before-unscale",
        "gradients are clipped before they are unscaled",
        "Scaled gradients are tens of thousands of times longer, so every step is clipped; dividing by the scale "
        "afterwards leaves gradients that are as many times too short. The bound is not the one that was asked for, it "
        "moves with the scale, and the smallest gradients come down to AdamW's eps. The check is in the warm-up before "
        "step 1, which uses small scales: there the gradients are less too short.",
    )
    plan = lab.plan(1, *FP16)
    right, wrong = (lab.in_ranks(1, ranks.by_hand, plan, STEPS, one)[0] for one in ("", shown.name))
    scale, bound = wrong["scale"][0], plan.spec.optimizer.clip_norm
    ratio = wrong["norm"][0] / right["norm"][0]
    shown.seen += [
        f"gradient norm in step 1: {wrong['norm'][0]:,.0f} before clipping, in place of {right['norm'][0]:.3g}; "
        f"{wrong['clipped'][0]:.3g} after clipping and unscaling, in place of {right['clipped'][0]:.3g} "
        f"(loss scale {scale:,.0f}, optimizer.clip_norm {bound:g})",
        f"{losses(wrong['loss'], right['loss'])}; no error, and a curve that falls",
    ]
    lab.fact(
        shown,
        "where nobody checks, the recorded norm is too long by the scale, and the gradient too short by it",
        f"norm × {scale:g}, and {bound:g} / {scale:g} = {bound / scale:.3g} left",
        f"norm × {ratio:.6g}, and {wrong['clipped'][0]:.3g} left",
        math.isclose(ratio, scale, rel_tol=0.01)
        and math.isclose(wrong["clipped"][0], bound / scale, rel_tol=0.01),
    )
    lab.refused(shown, plan, shown.name, "after clipping")
    return shown


def half_everything(lab: Lab) -> Shown:
    """The masters are fp16, too."""
    shown = Shown(
        "half-everything",
        ".half() on everything: what AdamW updates is fp16, too",
        "Near 1 fp16 numbers are 0.001 apart, so smaller updates are rounded away; and the square of a gradient below "
        "0.0002 is 0 in fp16, so that AdamW divides by nearly nothing.",
    )
    plan = lab.plan(1, *UNSCALED)
    right, wrong = (lab.in_ranks(1, ranks.by_hand, plan, STEPS, one)[0] for one in ("", shown.name))
    ruined = next((at for at, loss in enumerate(wrong["loss"], 1) if not math.isfinite(loss)), None)
    shown.seen.append(
        losses(wrong["loss"], right["loss"]) + (f"; not a number from step {ruined} on" if ruined else "")
    )
    lab.fact(
        shown,
        "where nobody checks, the same Spec that trains with fp32 masters does not train",
        "a last loss that is not finite, or higher than at the start",
        f"{wrong['loss'][-1]:.4g} after {STEPS} steps, from {wrong['loss'][0]:.4g} (fp32: {right['loss'][-1]:.4g})",
        right["finite"] and not wrong["loss"][-1] < wrong["loss"][0],
    )
    lab.refused(shown, plan, shown.name, "parameters and moments in torch.float32", "torch.float16 in")
    return shown


def inf_on_one_rank(lab: Lab) -> Shown:
    """An overflow in one rank's share, and each rank decides for itself."""
    shown = Shown(
        "each-rank-alone",
        "an Inf on one rank of two, each decides alone whether to skip",
        "Under zero 2 each rank has a share of the gradient. The rank whose share overflowed skips and backs off; the "
        "other updates. From then on half of the model is a step ahead, and gradients are summed under two scales.",
    )
    plan = lab.plan(2, *FP16, *TWO)
    both = lab.in_ranks(2, ranks.by_hand, plan, STEPS_OF_TWO, "inf-on-one-rank")
    alone = lab.in_ranks(2, ranks.by_hand, plan, STEPS_OF_TWO, shown.name)
    shown.seen += [
        f"rank {rank}: {'no update' if seen['skipped'][INF_STEP] else 'an update'} in step {INF_STEP + 1}; "
        f"{seen['updates']} updates in {STEPS_OF_TWO} steps; loss scale {seen['scale'][INF_STEP]:,.0f} in step "
        f"{INF_STEP + 1}, {seen['scale'][-1]:,.0f} in step {STEPS_OF_TWO}"
        for rank, seen in enumerate(alone)
    ]
    lab.fact(
        shown,
        "where each decides alone, one rank skips and the other does not, without an error",
        f"rank {INF_RANK} alone skips; other scales; other counts of updates",
        "; ".join(
            f"rank {rank}: {seen['updates']} updates, then a loss scale of {seen['scale'][-1]:,.0f}"
            for rank, seen in enumerate(alone)
        ),
        alone[0]["updates"] == alone[1]["updates"] + 1 and alone[0]["scale"][-1] == 2 * alone[1]["scale"][-1],
    )
    lab.fact(
        shown,
        "the product skips on every rank, moves no parameter, and halves the loss scale on all of them",
        f"{STEPS_OF_TWO - 1} updates on each, nothing moved in step {INF_STEP + 1}",
        "; ".join(
            f"rank {rank}: {seen['updates']} updates, {seen['moved'][INF_STEP]:.0%} of its elements moved in step "
            f"{INF_STEP + 1}, then a loss scale of {seen['scale'][-1]:,.0f}"
            for rank, seen in enumerate(both)
        ),
        all(
            seen["skipped"] == [at == INF_STEP for at in range(STEPS_OF_TWO)]
            and seen["moved"][INF_STEP] == 0
            and seen["updates"] == STEPS_OF_TWO - 1
            and seen["scale"][-1] == seen["scale"][0] / 2
            for seen in both
        ),
    )
    _recorded(lab, shown)
    lab.refused(shown, plan, shown.name, "an update on all of them or on none")
    return shown


def _recorded(lab: Lab, shown: Shown) -> None:
    """The same accident in the product's own loop."""
    plan = lab.plan(2, *FP16, *TWO)
    run = lab.run("inf-on-one-rank", plan)
    lab.in_ranks(2, ranks.course, plan, run.path, "inf-on-one-rank")
    reader = RunReader(run.path)
    lines = [int(line["step"]) for line in reader.metrics() if line.get("skipped")]
    events = [[int(e["step"]) for e in reader.events(rank) if e["kind"] == "skipped"] for rank in (0, 1)]
    shown.fourfold.append(
        f"its own loop after the same accident, without the mistake: step {INF_STEP + 1} makes no update on either "
        "rank, and the run goes on"
    )
    lab.fact(
        shown,
        "the skipped step stands in the metrics, and in the events of both ranks",
        f"step {INF_STEP + 1} in each",
        f"steps {lines} in the metrics, {events[0]} in the events of rank 0, {events[1]} in those of rank 1",
        lines == [INF_STEP + 1] and events == [[INF_STEP + 1]] * 2,
    )


EXERCISES = (clip_before_unscale, half_everything, inf_on_one_rank)
