"""The batch meets the data-parallel degree: two of its three numbers give the third."""

from __future__ import annotations

from fourfold.spec.degrees import nearest_divisors
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.rules_model import either, multiples_near
from fourfold.spec.training import BatchSpec
from fourfold.spec.words import counted

_RELATION = "global_batch = micro_batch x accumulation x data-parallel degree"


def settle_batch(batch: BatchSpec, degree: int, where: str = "") -> BatchSpec:
    """`batch` on `degree` data-parallel ranks: all three numbers.

    global_batch or micro_batch alone goes with accumulation = 1. Raises SpecError, showing the arithmetic and the
    nearest legal values, where it does not divide; `where` the numbers stand goes with it.
    """
    whole, micro, accumulation = batch.global_batch, batch.micro_batch, batch.accumulation
    if whole is None:
        if micro is None:
            raise SpecError(_no_samples(accumulation, degree, where))
        accumulation = accumulation or 1
        whole = micro * accumulation * degree
    elif micro is None:
        accumulation = accumulation or 1
        micro = _third(whole, "accumulation", accumulation, degree, where)
    elif accumulation is None:
        accumulation = _third(whole, "micro_batch", micro, degree, where)
    elif whole != micro * accumulation * degree:
        raise SpecError(_unequal(whole, micro, accumulation, degree, where))
    return BatchSpec(global_batch=whole, micro_batch=micro, accumulation=accumulation)


def _third(whole: int, key: str, given: int, degree: int, where: str) -> int:
    """The third number of the batch, from global_batch and the one given under `key`."""
    if whole % (given * degree) == 0:
        return whole // (given * degree)
    other = "accumulation" if key == "micro_batch" else "micro_batch"
    ways = [either("batch.global_batch", multiples_near(whole, given * degree))]
    if whole % degree == 0:
        ways.append(either(f"batch.{key}", nearest_divisors(whole // degree, given)))
    raise SpecError(
        Problem(
            asked=f"batch.global_batch = {whole} with batch.{key} = {given} on {_ranks(degree)}",
            found=f"{whole} / ({given} x {degree}) = {whole / (given * degree):.4g}",
            why=f"{_RELATION}, so {other} would be no whole number",
            instead=" or ".join(ways),
            where=where,
        )
    )


def _unequal(whole: int, micro: int, accumulation: int, degree: int, where: str) -> Problem:
    product = micro * accumulation * degree
    ways = [f"--set batch.global_batch={product}"]
    if whole % (micro * degree) == 0:
        ways.append(f"--set batch.accumulation={whole // (micro * degree)}")
    if whole % (accumulation * degree) == 0:
        ways.append(f"--set batch.micro_batch={whole // (accumulation * degree)}")
    return Problem(
        asked=f"batch.global_batch = {whole} with batch.micro_batch = {micro}, batch.accumulation = {accumulation}"
        f" on {_ranks(degree)}",
        found=f"{whole} != {micro} x {accumulation} x {degree} = {product}",
        why=f"{_RELATION}; two of the numbers are enough",
        instead=" or ".join(ways),
        where=where,
    )


def _no_samples(accumulation: int | None, degree: int, where: str) -> Problem:
    alone = f" (batch.accumulation = {accumulation} alone counts no samples)" if accumulation else ""
    return Problem(
        asked=f"a batch on {_ranks(degree)}",
        found=f"no batch.global_batch and no batch.micro_batch{alone}",
        why=f"{_RELATION}; there is no default for how many samples a step takes",
        instead=f"--set batch.global_batch={8 * degree * (accumulation or 1)} or --set batch.micro_batch=8",
        where=where,
    )


def _ranks(degree: int) -> str:
    return counted(degree, "data-parallel rank")
