"""Which layouts of one Spec are legal, by the rows of a table of rules; and the nearest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fourfold.spec.batch import settle_batch
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.fit import SETTINGS, Settings, settings_of, ways
from fourfold.spec.grid import AXES
from fourfold.spec.rule import Rule
from fourfold.spec.spec import Spec
from fourfold.spec.training import LayoutSpec

_BATCH = ("global_batch", "micro_batch", "accumulation")


class Judge:
    """Asked about many layouts of one Spec; a rule's verdict is kept by the settings that the rule names.

    Called with settings without "auto": whether no rule refuses them and the batch divides.
    """

    def __init__(self, spec: Spec, rules: Sequence[Rule], batch: bool = True) -> None:
        """rules: those that look at what tells layouts apart count. batch: whether it must divide, if it is given."""
        self._spec = spec
        self._rows: list[tuple[Rule, tuple[str, ...], dict[tuple[object, ...], bool]]] = [
            (rule, names, {}) for rule in rules if (names := settings_in(rule))
        ]
        self._must_divide = batch and bool(spec.batch.global_batch or spec.batch.micro_batch)
        self._batches: dict[int, Problem | None] = {}

    def __call__(self, settings: Settings) -> bool:
        return self.refusing(settings) is None and (
            not self._must_divide or self.batch_problem(settings) is None
        )

    def refusing(self, settings: Settings, within: Sequence[str] = SETTINGS) -> Rule | None:
        """The first rule that refuses `settings`, of those that name no setting outside `within`."""
        for rule, names, verdicts in self._rows:
            if any(name not in within for name in names):
                continue
            key = tuple(settings[name] for name in names)
            if key not in verdicts:
                verdicts[key] = rule.applies(self.spec_with(settings))
            if verdicts[key]:
                return rule
        return None

    def batch_problem(self, settings: Settings) -> Problem | None:
        """Why the batch cannot be cut over the data-parallel ranks of `settings`, if so."""
        degree = settings["dp_replicate"] * settings["dp_shard"]
        if degree not in self._batches:
            try:
                settle_batch(self._spec.batch, degree)
            except SpecError as error:
                self._batches[degree] = error.problems[0]
            else:
                self._batches[degree] = None
        return self._batches[degree]

    def spec_with(self, settings: Settings) -> Spec:
        """The Spec with the layout that `settings` are."""
        layout = self._spec.layout.model_copy(update=dict(settings))
        return self._spec.model_copy(update={"layout": layout})


def nearest(asked: Spec, world: int, rules: Sequence[Rule], batch: bool = True) -> str:
    """What to type for the nearest layouts of `world` ranks that `rules` allow; "" if there are none.

    asked: the Spec as it was typed, so that "auto" is still "auto". batch: it must divide, too; where it does so on
    no layout near, it is changed with the layout.
    """
    judge, settings = Judge(asked, rules, batch), settings_of(asked.layout)
    found = [str(way) for way in ways(settings, world, judge)]
    if not found:
        for way in ways(settings, world, lambda settled: judge.refusing(settled) is None, limit=1):
            problem = judge.batch_problem(way.settled)
            found = [str(way) + (f" {problem.instead.partition(' or ')[0]}" if problem else "")]
    return "\n     or  ".join(found)


def as_asked(spec: Spec, provenance: Mapping[str, str] | None) -> Spec:
    """A Spec that may be settled as it was typed: what has no provenance was computed, and is left open again."""
    if provenance is None:
        settled = all(getattr(spec.batch, key) is not None for key in _BATCH)
        open_batch = {"accumulation": None} if settled else {}
        open_layout = {}
    else:
        open_batch = dict.fromkeys(key for key in _BATCH if f"batch.{key}" not in provenance)
        plain = LayoutSpec()
        axes = [axis for axis in ("dp_replicate", "dp_shard") if f"layout.{axis}" not in provenance]
        open_layout = {axis: getattr(plain, axis) for axis in axes}
    layout = spec.layout.model_copy(update=open_layout)
    return spec.model_copy(update={"layout": layout, "batch": spec.batch.model_copy(update=open_batch)})


def world_of(layout: LayoutSpec) -> int | None:
    """The world that a layout fills; None while a degree is "auto"."""
    world = 1
    for axis in AXES:
        degree = getattr(layout, axis)
        if degree == "auto":
            return None
        world *= degree
    return world


def settings_in(rule: Rule) -> tuple[str, ...]:
    """The settings that tell layouts apart, of those that `rule` names."""
    names = (key.removeprefix("layout.") for key in rule.keys if key.startswith("layout."))
    return tuple(name for name in names if name in SETTINGS)


def about_degrees(rule: Rule) -> bool:
    """Whether another layout is the way out: nothing that collides is a setting of another kind."""
    others = [key for key in rule.keys if key.removeprefix("layout.") not in SETTINGS]
    return bool(settings_in(rule)) and all(key.startswith(("model.", "data.")) for key in others)
