"""Rules about pipeline parallel: stages, their schedule, its microbatches. Each function gives the problem, or None."""

from __future__ import annotations

from fourfold.spec.degrees import divisors
from fourfold.spec.errors import Problem
from fourfold.spec.model import DecoderSpec, MlpSpec
from fourfold.spec.rules_model import either
from fourfold.spec.schedules import SCHEDULES, stages_each, stages_in_all
from fourfold.spec.settings import typed
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted


def pp_has_layers(spec: Spec) -> Problem | None:
    """Every rank of a pipeline is to have a block."""
    model, pp = spec.model, spec.layout.pp
    if not isinstance(model, DecoderSpec | MlpSpec) or pp <= model.layers:
        return None
    return Problem(
        asked=f"layout.pp = {pp} with model.layers = {model.layers}",
        found=f"{counted(pp, 'pipeline stage')} for {counted(model.layers, 'layer')}",
        why="every stage holds at least one layer",
        instead=either("layout.pp", [n for n in divisors(pp) if n <= model.layers][-1:]),
    )


def stages_have_layers(spec: Spec) -> Problem | None:
    """Where a schedule puts several stages on a rank, each of them is to have a block."""
    model, layout = spec.model, spec.layout
    schedule, pp = SCHEDULES[layout.pp_schedule], layout.pp
    each = schedule.stages if schedule.fixed else stages_each(layout)
    if not isinstance(model, DecoderSpec | MlpSpec) or not 1 < pp <= model.layers < pp * each:
        return None
    fewer = model.layers // pp
    ways = [f"--set layout.pp_virtual={fewer}"] if fewer > 1 and not schedule.fixed else []
    ways.append(_schedule("1f1b") + (" --set layout.pp_virtual=1" if layout.pp_virtual else ""))
    return Problem(
        asked=f'layout.pp_schedule = "{layout.pp_schedule}" with layout.pp = {pp} and model.layers = {model.layers}',
        found=f"{counted(pp * each, 'pipeline stage')}, {each} on each rank, for {counted(model.layers, 'layer')}",
        why="every stage holds at least one layer",
        instead=" or ".join(ways),
    )


def virtual_stages(spec: Spec) -> Problem | None:
    """How many stages a rank has is a matter of the schedule."""
    layout = spec.layout
    schedule = SCHEDULES[layout.pp_schedule]
    asked = layout.pp_virtual
    if layout.pp == 1 or asked is None or asked == schedule.stages or not schedule.fixed:
        return None
    several = "interleaved-1f1b" if asked > 1 else "1f1b"
    return Problem(
        asked=f'layout.pp_virtual = {asked} with layout.pp_schedule = "{layout.pp_schedule}"',
        found=f"a schedule of {counted(schedule.stages, 'stage')} a rank",
        why="its order of microbatches is made for that number",
        instead=f"--set layout.pp_virtual={schedule.stages} or {_schedule(several)}",
    )


def split_fits(spec: Spec) -> Problem | None:
    """`pp_split` names every block once."""
    layout, model = spec.layout, spec.model
    if layout.pp == 1 or layout.pp_split is None:
        return None
    stages = stages_in_all(layout)
    layers = model.layers if isinstance(model, DecoderSpec | MlpSpec) else None
    if len(layout.pp_split) == stages and layers in (None, sum(layout.pp_split)):
        return None
    shown = "[" + ", ".join(map(str, layout.pp_split)) + "]"
    of = "" if layers is None else f" of {counted(layers, 'layer')}"
    ways = []
    if layers is not None and layers >= stages:
        even = [layers // stages + (at < layers % stages) for at in range(stages)]
        ways.append("--set layout.pp_split=[" + ",".join(map(str, even)) + "]")
    return Problem(
        asked=f"layout.pp_split = {shown} with {counted(stages, 'stage')}{of}",
        found=f"{counted(len(layout.pp_split), 'number')} that add up to {sum(layout.pp_split)}",
        why="it says how many layers each stage has: a number for each stage, and every layer in one",
        instead=" or ".join([*ways, "no layout.pp_split  (split by cost)"]),
    )


def splits_keep_parameters(spec: Spec) -> Problem | None:
    """FSDP2 reduces, and drops, when a unit's inputs have their gradients: those of its parameters come later here."""
    layout = spec.layout
    if layout.pp == 1 or layout.zero < 2 or not SCHEDULES[layout.pp_schedule].splits:
        return None
    return Problem(
        asked=f'layout.zero = {layout.zero} with layout.pp_schedule = "{layout.pp_schedule}"',
        found="backwards in two halves, and units that FSDP2 reduces or drops between them",
        why="gradients of parameters come after those of inputs, when what they are computed from is gone: with "
        "torch's FSDP2 they would be wrong without an error",
        instead=f"--set layout.zero=1 or {_schedule('interleaved-1f1b')}",
    )


def microbatches_fill(spec: Spec) -> Problem | None:
    """Orders that exist for some numbers of microbatches only."""
    layout, count = spec.layout, spec.batch.accumulation
    if layout.pp == 1 or count is None:
        return None
    asked = f'batch.accumulation = {count} with layout.pp_schedule = "{layout.pp_schedule}"'
    stages = stages_in_all(layout)
    if layout.pp_schedule == "dualpipe-v" and count < stages:
        return Problem(
            asked=asked,
            found=f"{counted(count, 'microbatch')} for {counted(stages, 'stage')}",
            why="it sends microbatches from both ends of the V: there must be one for each stage",
            instead=f"--set batch.accumulation={stages} or {_schedule('zbv')}",
        )
    if layout.pp_schedule in ("interleaved-1f1b", "interleaved-zero-bubble") and count % _rounds(
        count, layout.pp
    ):
        near = [
            n
            for n in range(max(1, count - layout.pp), count + layout.pp + 1)
            if n % _rounds(n, layout.pp) == 0
        ]
        below, above = [n for n in near if n < count][-1:], [n for n in near if n > count][:1]
        return Problem(
            asked=asked,
            found=f"{counted(count, 'microbatch')} over {counted(layout.pp, 'rank')}, in "
            f"{counted(_rounds(count, layout.pp), 'round')} that would not be alike",
            why="microbatches go round the ranks in rounds of the same number",
            instead=either("batch.accumulation", [*below, *above]),
        )
    return None


def _schedule(name: str) -> str:
    return typed("layout.pp_schedule", f'"{name}"')


def _rounds(count: int, ranks: int) -> int:
    return max(1, count // ranks)
