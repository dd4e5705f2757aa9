"""What may stand together in a Spec: one table of rules, each naming the settings that collide.

A rule is broken "always" (no version of Fourfold could do it) or only to "train" (planned for, not built yet).
Rules look at one Spec, settled or not; what needs the world size stands in `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fourfold.spec import rules_data, rules_model, rules_training
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.rules_planned import PLANNED
from fourfold.spec.spec import Spec

When = Literal["always", "train"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: `find` gives the problem of a Spec that breaks the rule; `keys` are the settings that collide."""

    name: str
    keys: tuple[str, ...]
    find: Callable[[Spec], Problem | None]
    when: When = "always"

    def applies(self, spec: Spec) -> bool:
        """Whether `spec` breaks this rule."""
        return self.find(spec) is not None

    def problem(self, spec: Spec) -> Problem:
        """What is wrong; only for a Spec to which the rule applies."""
        problem = self.find(spec)
        assert problem is not None, f"rule {self.name} does not apply"
        return problem


RULES: tuple[Rule, ...] = (
    Rule("equal groups of heads", ("model.kv_heads", "model.heads"), rules_model.kv_heads),
    Rule("whole head width", ("model.width", "model.heads"), rules_model.head_width),
    Rule(
        "even rotary width",
        ("model.head_width", "model.mla.rope_head_width", "model.width", "model.heads"),
        rules_model.even_rotary,
    ),
    Rule("position table", ("model.positions", "model.max_sequence"), rules_model.learned_positions),
    Rule("latent attention alone", ("model.kv_heads", "model.head_width"), rules_model.mla_alone),
    Rule("experts for a token", ("model.moe.top_k", "model.moe.experts"), rules_model.moe_counts),
    Rule("two classes", ("model.outputs", "model.task"), rules_model.mlp_classes),
    Rule("data of the model's kind", ("model.kind", "data.kind"), rules_data.model_takes),
    Rule("a token for every byte", ("model.vocabulary", "data.kind"), rules_data.byte_vocabulary),
    Rule("sizes of synthetic data", ("data.inputs", "data.outputs", "data.task"), rules_data.synthetic_sizes),
    Rule("transforms of the data's kind", ("data.transforms", "data.kind"), rules_data.transforms),
    Rule("paths named", ("data.path", "data.validation_path"), rules_data.paths),
    Rule(
        "a validation set",
        ("run.validate_every", "data.validation_fraction"),
        rules_data.something_to_validate,
    ),
    Rule("one auto degree", ("layout.dp_shard", "layout.dp_replicate"), rules_training.one_auto),
    Rule("zero shards", ("layout.dp_shard", "layout.zero"), rules_training.zero_shards),
    Rule("sp needs tp", ("layout.sp", "layout.tp"), rules_training.sp_needs_tp),
    Rule("ep needs experts", ("layout.ep", "model.moe.experts"), rules_training.ep_needs_experts),
    Rule("tp keeps heads whole", ("layout.tp", "model.heads"), rules_training.tp_divides_heads),
    Rule("a layer for every stage", ("layout.pp", "model.layers"), rules_training.pp_has_layers),
    Rule(
        "schedule inside the run",
        ("optimizer.decay_steps", "optimizer.warmup_steps", "run.steps"),
        rules_training.schedule_fits,
    ),
    Rule("betas below one", ("optimizer.betas",), rules_training.betas_below_one),
    Rule("seed of 63 bits", ("run.seed",), rules_training.seed_fits),
    Rule("run.dir named", ("run.dir",), rules_training.dir_named),
    Rule(
        "tensors by their whole names",
        ("checkpoint.allow_missing", "checkpoint.allow_surplus"),
        rules_training.tensors_named,
    ),
    *(Rule(f"{row.key} not trained yet", (row.key,), row, "train") for row in PLANNED),
)


def check(spec: Spec, when: When = "train", provenance: Mapping[str, str] | None = None) -> list[Problem]:
    """Every rule that `spec` breaks: "always" only those no version can do, "train" those and what is not built yet.

    `provenance` (of the loaded Spec) says where the colliding settings stand.
    """
    return [
        replace(problem, where=place_of(rule.keys, provenance or {}))
        for rule in RULES
        if (rule.when == "always" or when == "train") and (problem := rule.find(spec)) is not None
    ]


def require(spec: Spec, when: When = "train", provenance: Mapping[str, str] | None = None) -> None:
    """Raise SpecError with every problem that `check` finds."""
    problems = check(spec, when, provenance)
    if problems:
        raise SpecError(problems)


def place_of(keys: tuple[str, ...], provenance: Mapping[str, str]) -> str:
    """Where the colliding settings stand, by provenance; a `--set` rather than the file, for it came last."""
    places = [provenance[key] for key in keys if key in provenance]
    places += [place for path, place in provenance.items() if any(path.startswith(f"{key}.") for key in keys)]
    return min(places, key=lambda place: not place.startswith("--set"), default="")
