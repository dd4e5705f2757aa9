"""A Spec meets its world size: degrees that are "auto", and the batch's third number, become plain integers."""

from __future__ import annotations

from collections.abc import Mapping

from fourfold.spec.batch import settle_batch
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.fit import fit
from fourfold.spec.rules import check, judge, place_of
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec


def settle(spec: Spec, world: int, provenance: Mapping[str, str] | None = None) -> Spec:
    """`spec` for `world` ranks: every degree an int, the batch's three numbers ints. Idempotent.

    global_batch = micro_batch × accumulation × data-parallel degree. Two numbers give the third; global_batch or
    micro_batch alone goes with accumulation = 1. `provenance` (of the loaded Spec) puts a place to each problem.
    Raises SpecError, showing the arithmetic and the nearest legal values, where the degrees do not fill the world;
    or where the batch does not divide, and where the settled Spec breaks a rule that can never be broken.
    """
    layout = fit(spec.layout, world, judge(spec))
    fitted = spec.model_copy(update={"layout": layout})
    problems: list[Problem] = []
    batch = spec.batch
    where = place_of(("batch.global_batch", "batch.micro_batch", "batch.accumulation"), provenance or {})
    try:
        batch = settle_batch(batch, data_parallel_degree(layout), where)
    except SpecError as error:
        problems += error.problems
    problems += check(fitted, "always", provenance, world)
    if problems:
        raise SpecError(problems)
    return fitted.model_copy(update={"batch": batch})


def data_parallel_degree(layout: LayoutSpec) -> int:
    """Ranks that see different samples: dp_replicate × dp_shard of a settled layout (cp cuts sequences instead)."""
    assert layout.dp_replicate != "auto" and layout.dp_shard != "auto", "settle the Spec first"
    return layout.dp_replicate * layout.dp_shard
