"""Rules about where state is held: units of sharding, prefetch, offload. Each function gives the problem, or None."""

from __future__ import annotations

from fourfold.spec.errors import Problem
from fourfold.spec.huggingface import facts_of
from fourfold.spec.model import DecoderSpec, MlpSpec
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec
from fourfold.spec.words import counted


def wrap_needs_zero(spec: Spec) -> Problem | None:
    wrap, zero = spec.layout.wrap, spec.layout.zero
    if wrap == 1 or zero:
        return None
    return Problem(
        asked=f"layout.wrap = {_word(wrap)} with layout.zero = 0",
        found="nothing that is gathered or scattered in units",
        why="replicas reduce gradients in buckets (layout.bucket_mib); units are those of zero 1, 2 and 3",
        instead="--set layout.wrap=1 or --set layout.zero=3",
    )


def wrap_has_blocks(spec: Spec) -> Problem | None:
    wrap, blocks = spec.layout.wrap, blocks_of(spec)
    if wrap == "model" or blocks is None or wrap <= blocks:
        return None
    return Problem(
        asked=f"layout.wrap = {wrap} with model.layers = {blocks}",
        found=f"fewer blocks than one unit would have: {blocks}",
        why="a unit has at most all blocks; with all of them in one, what is outside the blocks is still another",
        instead=f"--set layout.wrap={blocks} or --set layout.wrap=model",
    )


def prefetch_needs_zero_3(spec: Spec) -> Problem | None:
    layout = spec.layout
    if layout.prefetch == 0 or layout.zero == 3:
        return None
    return Problem(
        asked=f"layout.prefetch = {layout.prefetch} with layout.zero = {layout.zero}",
        found="parameters that are not gathered unit by unit for each forward and backward",
        why="only zero 3 drops what it gathered, so that it must be gathered again and can be ahead of time",
        instead="--set layout.prefetch=0 or --set layout.zero=3",
    )


def prefetch_has_units(spec: Spec) -> Problem | None:
    """Units ahead of the first one: those of blocks; what is outside the blocks is gathered before them."""
    layout, blocks = spec.layout, blocks_of(spec)
    if layout.prefetch == 0 or layout.zero != 3 or blocks is None:
        return None
    return beyond_units(layout, units_of(layout, blocks))


def beyond_units(layout: LayoutSpec, units: int) -> Problem | None:
    """More gathered ahead than the `units` of blocks; those of an imported model are known once it is built."""
    if layout.prefetch <= units:
        return None
    return Problem(
        asked=f"layout.prefetch = {layout.prefetch} with layout.wrap = {_word(layout.wrap)}",
        found="one unit that is gathered at once" if not units else f"{counted(units, 'unit')} of blocks",
        why="there are not so many units that could be gathered ahead",
        instead=f"--set layout.prefetch={units}",
    )


def offload_cpu_needs_zero(spec: Spec) -> Problem | None:
    if spec.layout.offload != "cpu" or spec.layout.zero:
        return None
    return Problem(
        asked='layout.offload = "cpu" with layout.zero = 0',
        found="torch's DDP, which computes with the parameters themselves and not with gathered copies",
        why="they must stay on the device; FSDP2, for zero 1, 2 and 3, gathers copies of what may lie elsewhere",
        instead="--set layout.zero=3 or --set layout.offload=disk",
    )


def offload_dir_is_used(spec: Spec) -> Problem | None:
    folder, offload = spec.layout.offload_dir, spec.layout.offload
    if folder is None or (folder.strip() and offload == "disk"):
        return None
    if not folder.strip():
        return Problem(
            asked=f'layout.offload_dir = "{folder}"',
            found="an empty path",
            why="it names no folder",
            instead="leave layout.offload_dir out for a folder in the run directory",
        )
    return Problem(
        asked=f'layout.offload_dir = "{folder}" with layout.offload = "{offload}"',
        found="a folder in which nothing would be kept",
        why='only layout.offload = "disk" keeps files; the folder would be silently ignored',
        instead="leave layout.offload_dir out or --set layout.offload=disk",
    )


def blocks_of(spec: Spec) -> int | None:
    """How many blocks a model has; None for an imported one, which says itself once it is built."""
    model = spec.model
    if isinstance(model, DecoderSpec | MlpSpec):
        return model.layers
    known = facts_of(model)
    return None if known is None else known.layers


def units_of(layout: LayoutSpec, blocks: int) -> int:
    """How many units of sharding `blocks` make; what is outside the blocks is one more."""
    return 0 if layout.wrap == "model" else -(-blocks // layout.wrap)


def _word(wrap: int | str) -> str:
    return f'"{wrap}"' if isinstance(wrap, str) else str(wrap)
