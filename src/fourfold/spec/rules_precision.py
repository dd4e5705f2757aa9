"""Rules about dtypes. Each function gives the problem, or None (see `rules`)."""

from __future__ import annotations

from fourfold.spec.errors import Problem
from fourfold.spec.keys import toml_word
from fourfold.spec.spec import Spec
from fourfold.spec.training import PrecisionSpec

SCALE = ("scale_start", "scale_growth", "scale_every", "scale_backoff")


def scale_is_used(spec: Spec) -> Problem | None:
    asked, plain = spec.precision, PrecisionSpec()
    given = [key for key in SCALE if getattr(asked, key) != getattr(plain, key)]
    if asked.compute == "fp16" or not given:
        return None
    return Problem(
        asked=", ".join(f"precision.{key} = {toml_word(getattr(asked, key))}" for key in given)
        + f' with precision.compute = "{asked.compute}"',
        found="a loss scale where none is needed",
        why=f"{asked.compute} reaches as far as fp32, or further: only fp16 loses small gradients, and is scaled; the "
        "setting would be silently ignored",
        instead="--set precision.compute=fp16 or "
        + " ".join(f"--set precision.{key}={toml_word(getattr(plain, key))}" for key in given),
    )


def tf32_is_for_cuda(spec: Spec) -> Problem | None:
    if not spec.precision.tf32:
        return None
    asked = "precision.tf32 = true with "
    if spec.hardware.device == "cpu":
        return Problem(
            asked=asked + 'hardware.device = "cpu"',
            found="a CPU, which has no TF32",
            why="the setting would be silently ignored",
            instead="--set precision.tf32=false or --set hardware.device=cuda",
        )
    if spec.precision.compute == "fp64":
        return Problem(
            asked=asked + 'precision.compute = "fp64"',
            found="matrix products of 53 bits",
            why="TF32 computes those of fp32; the setting would be silently ignored",
            instead="--set precision.tf32=false or --set precision.compute=fp32",
        )
    return None


def fp64_reduces_in_fp64(spec: Spec) -> Problem | None:
    if spec.precision.compute != "fp64" or spec.precision.reduce == "fp32":
        return None
    return Problem(
        asked=f'precision.reduce = "{spec.precision.reduce}" with precision.compute = "fp64"',
        found="gradients of 53 bits, to be summed in 8",
        why="fp64 is for verification: what its reduction rounds away it was asked to show",
        instead="--set precision.reduce=fp32 or --set precision.compute=fp32",
    )


def replicas_reduce_in_fp32(spec: Spec) -> Problem | None:
    """By a library: FSDP2 sums replicas in the dtype in which it also adds up microbatches, or in none of its own."""
    layout = spec.layout
    beside = layout.zero > 0 and layout.dp_shard != 1, layout.tp > 1
    if spec.precision.reduce == "fp32" or layout.dp_replicate in (1, "auto") or not any(beside):
        return None
    other = f"layout.zero = {layout.zero}" if beside[0] else f"layout.tp = {layout.tp}"
    return Problem(
        asked=f'precision.reduce = "bf16" with layout.dp_replicate = {layout.dp_replicate} and {other}',
        found="two reductions, of which one could only be had in bf16 with microbatches added up in bf16, too",
        why="a setting means the same on every layout, and torch's FSDP2 takes no other all-reduce between replicas",
        instead="--set precision.reduce=fp32"
        + (
            f" or --set layout.dp_replicate=1 --set layout.dp_shard={layout.dp_replicate * layout.dp_shard}"
            if beside[0] and isinstance(layout.dp_shard, int)
            else f" or --set layout.dp_replicate=1 --set layout.dp_shard={layout.dp_replicate} --set layout.zero=1"
        ),
    )
