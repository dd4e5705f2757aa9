"""Rules about exact mode: what it can hold. Each function gives the problem, or None."""

from __future__ import annotations

from fourfold.spec.errors import Problem
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted

INSIDE = {"pp": "stages", "cp": "tokens", "tp": "features", "ep": "experts"}


def exact_without(axis: str, spec: Spec) -> Problem | None:
    """Such an axis cuts sums inside the model, where no tree over microbatches reaches."""
    degree = getattr(spec.layout, axis)
    if not spec.run.exact or degree == 1:
        return None
    return Problem(
        asked=f"run.exact = true with layout.{axis} = {degree}",
        found=f"sums over {INSIDE[axis]} that are cut between ranks",
        why="exact mode sums the gradients of whole microbatches in one order; what is summed inside the model in "
        "other parts has other bits, and so has all that follows",
        instead=f"--set layout.{axis}=1 or --set run.exact=false",
    )


def exact_halves(spec: Spec) -> Problem | None:
    """Each rank's sum is to be a node of one binary tree."""
    layout = spec.layout
    degrees = layout.dp_replicate, layout.dp_shard
    if not spec.run.exact or "auto" in degrees:
        return None
    ranks = int(layout.dp_replicate) * int(layout.dp_shard)
    if ranks & (ranks - 1) == 0:
        return None
    below = 1 << (ranks.bit_length() - 1)
    return Problem(
        asked=f"run.exact = true on {counted(ranks, 'data-parallel rank')}",
        found=f"{ranks} is no power of two",
        why="the gradients of all microbatches are summed in one binary tree, of which each rank forms a branch",
        instead=f"--nproc {below} or --nproc {2 * below}, with as many data-parallel ranks; or --set run.exact=false",
    )


def exact_reduces_wide(spec: Spec) -> Problem | None:
    """What is rounded on its way is rounded once for each rank."""
    if not spec.run.exact or spec.precision.reduce != "bf16":
        return None
    return Problem(
        asked='run.exact = true with precision.reduce = "bf16"',
        found="gradients that are rounded on their way from rank to rank",
        why="on one rank nothing is on its way: the bits would depend on how many there are",
        instead="--set precision.reduce=fp32 or --set run.exact=false",
    )
