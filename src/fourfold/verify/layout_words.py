"""A layout that was judged: in a few words, and as the settings that judge it alone."""

from __future__ import annotations

from fourfold.spec.data import SyntheticDataSpec
from fourfold.spec.grid import AXES, Grid
from fourfold.spec.keys import toml_word
from fourfold.spec.schedules import stages_each
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec

_PLAIN = LayoutSpec()  # what need not be told


def words(layout: LayoutSpec) -> str:
    """A settled layout in a few words, such as "dp_shard 4 × tp 2, zero 3, sp"."""
    grid = Grid.of(layout)
    used = [f"{axis} {grid.degree(axis)}" for axis in AXES if grid.degree(axis) > 1] or ["one rank"]
    parts = [" × ".join(used)] + [f"ep {layout.ep}"] * (layout.ep > 1)
    parts += [f"zero {layout.zero}"] * (layout.zero > 0) + ["sp"] * layout.sp
    parts += [layout.cp_method] * (layout.cp > 1 and layout.cp_method != _PLAIN.cp_method)
    parts += [layout.pp_schedule] * (layout.pp > 1 and layout.pp_schedule != _PLAIN.pp_schedule)
    parts += [f"{stages_each(layout)} stages a rank"] * (layout.pp > 1 and layout.pp_virtual is not None)
    parts += [f"split {'+'.join(map(str, layout.pp_split or ()))}"] * (
        layout.pp > 1 and layout.pp_split is not None
    )
    parts += [f"recompute {layout.recompute}"] * (layout.recompute != "none")
    return ", ".join(parts + ["compiled"] * (layout.compile != "none"))


def settings(spec: Spec) -> tuple[str, ...]:
    """What `--set` makes a Spec judge this layout alone, on the same model and batch."""
    layout, batch, model = spec.layout, spec.batch, spec.model
    values = {f"layout.{axis}": getattr(layout, axis) for axis in (*AXES, "ep", "zero")}
    values = {key: value for key, value in values.items() if value != 1 or key == "layout.dp_replicate"}
    values |= {"layout.sp": str(layout.sp).lower(), "batch.global_batch": batch.global_batch}
    values |= {"batch.micro_batch": batch.micro_batch, "batch.accumulation": batch.accumulation}
    options = (
        "recompute",
        "recompute_keep",
        "compile",
        "compile_backend",
        "cp_method",
        "pp_schedule",
        "pp_virtual",
        "pp_split",
    )
    for option in options:
        if (value := getattr(layout, option)) != getattr(_PLAIN, option):
            values[f"layout.{option}"] = toml_word(value)
    decoder = getattr(model, "args", {}).get("decoder", {})
    if "layers" in decoder:
        values["model.layers"] = decoder["layers"]
    if not isinstance(spec.data, SyntheticDataSpec):
        values["data.sequence"] = spec.data.sequence
    return tuple(f"{key}={value}" for key, value in values.items())
