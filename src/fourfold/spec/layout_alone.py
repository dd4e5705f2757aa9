"""A layout without a Spec around it: only settings of `[layout]`, and only the rules that are about nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pydantic import ValidationError

from fourfold.spec.draft import Draft
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.fit import fit
from fourfold.spec.legal import Judge, nearest
from fourfold.spec.problems import problems_of
from fourfold.spec.rules import RULES
from fourfold.spec.settings import Setting, parse_settings
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec

PER_NODE = ("hardware", "devices_per_node")


class Alone(NamedTuple):
    """A layout, and how many ranks stand on a node."""

    layout: LayoutSpec
    devices_per_node: int


def layout_alone(sets: Sequence[str], world: int) -> Alone:
    """The layout that `sets` (`layout.key=value`, TOML) describe, for `world` ranks: every degree an int.

    Beside settings of [layout] only hardware.devices_per_node counts.

    Raises SpecError with every unreadable setting, every setting of another section and every wrong value; or, if
    there is none, where the degrees cannot fill `world` or the settings collide.
    """
    settings, problems = parse_settings(sets)
    # A Spec must have a model; no rule about layouts alone looks at it.
    draft = Draft({"model": {"kind": "mlp"}, "data": {"kind": "synthetic"}}, file="--set")
    for setting in settings:
        if setting.path[0] == "layout" or setting.path == PER_NODE:
            draft.apply(setting)
        else:
            problems.append(_of_another_section(setting))
    try:
        spec = Spec.model_validate(draft.raw)
    except ValidationError as error:
        problems += [problem for _, problem in problems_of(error, draft)]
    if problems:
        raise SpecError(problems)
    rules = [rule for rule in RULES if rule.when == "always" and _is_about_layouts(rule.keys)]
    fitted = spec.model_copy(update={"layout": fit(spec.layout, world, Judge(spec, rules, batch=False))})
    if broken := [problem for rule in rules if (problem := rule.find(fitted))]:
        instead = nearest(spec, world, rules, batch=False)
        raise SpecError([replace(problem, instead=instead or problem.instead) for problem in broken])
    return Alone(fitted.layout, fitted.hardware.devices_per_node)


def _is_about_layouts(keys: Sequence[str]) -> bool:
    return all(key.startswith("layout.") for key in keys)


def _of_another_section(setting: Setting) -> Problem:
    key = setting.path[-1]
    known = key in LayoutSpec.model_fields
    _, _, value = setting.text.partition("=")
    return Problem(
        asked=f"--set {setting.text}",
        found="a setting of no layout",
        why="without a SPEC only the settings of [layout] count",
        instead=f"--set layout.{key}={value}"
        if known
        else "name a SPEC first, such as tiny, or leave it away",
        where=f"--set #{setting.number}",
    )
