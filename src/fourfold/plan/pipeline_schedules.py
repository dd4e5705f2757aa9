"""The pipeline schedules by name: what torch's demand, and the bubble of each by the formula of its source.

The names are those of `layout.pp_schedule` (`spec.schedules`). Ranks are those of the pipeline axis.
"""

from __future__ import annotations

from fourfold.plan.pipeline_time import EVEN, Costs


def why_not(name: str, ranks: int, microbatches: int) -> str:
    """What this schedule demands and so many microbatches do not give; "" if it takes them. From torch 2.13."""
    stages = 2 * ranks
    rounds = max(1, microbatches // ranks)
    if name == "1f1b" and microbatches < ranks:
        return f"at least as many microbatches as stages ({ranks})"
    if name == "dualpipe-v" and microbatches < stages:
        return f"at least as many microbatches as stages ({stages})"
    if name in ("interleaved-1f1b", "interleaved-zero-bubble") and microbatches % rounds:
        return f"microbatches in {rounds} equal rounds"
    return ""


def idle_by_formula(name: str, ranks: int, microbatches: int, costs: Costs = EVEN) -> float | None:
    """Idle time of each rank in a step, by the source's formula; None where it has none for so few microbatches.

    costs: of one stage's pass, without transfers. A rank's work is then stages per rank × microbatches × (F + B),
    and its bubble idle / (idle + work): for GPipe and 1F1B (p - 1) / (m + p - 1), for v interleaved stages
    (p - 1) / (v·m + p - 1), whatever a backward costs. Two of them are not about the same thing as the timeline:
    ZB-V's is 0 by its own measure (`Timeline.bubble_inside`), and here what the ranks wait for the first microbatch;
    DualPipeV's is taken without overlap of a forward with a backward, as torch runs them one after the other.
    """
    forward, weight = costs.forward, costs.weight_gradient
    backward = costs.input_gradient + weight
    hops = ranks - 1
    if name in ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b"):
        return hops * (forward + backward)
    if name == "interleaved-zero-bubble":
        return hops * (forward + backward - 2 * weight)
    if name == "zbv":  # zero where F = I = W, and enough microbatches fill the V
        full = forward == costs.input_gradient == weight and microbatches >= 2 * ranks - 1
        return hops * forward if full else None
    if name == "dualpipe-v":
        return hops * ((forward + backward) + backward - 3 * weight)
    raise KeyError(name)


def bubble_by_formula(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, costs: Costs = EVEN
) -> float | None:
    """Idle share of a step, from 0 to 1, by `idle_by_formula`."""
    idle = idle_by_formula(name, ranks, microbatches, costs)
    if idle is None:
        return None
    return idle / (idle + stages_per_rank * microbatches * (costs.of("F") + costs.of("B")))
