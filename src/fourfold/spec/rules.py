"""What may stand together in a Spec: one table of rules, each naming the settings that collide.

A rule is broken "always" (no run could do it) or only to "train" (planned for, not built yet); `owed` says whether that
is due to mathematics, to a library, or to what is not built. Rules look at one Spec, settled or not. What needs the
world size is the product of degrees (`fit`) and the batch (`batch`); a new axis adds its rows here, and `check`,
`settle` and `layouts` know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fourfold.spec import (
    rules_compile,
    rules_context,
    rules_data,
    rules_exact,
    rules_experts,
    rules_huggingface,
    rules_layout,
    rules_memory,
    rules_model,
    rules_pipeline,
    rules_precision,
    rules_recompute,
    rules_training,
)
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.legal import Judge, about_degrees, as_asked, nearest, world_of
from fourfold.spec.rule import Rule, When
from fourfold.spec.rules_planned import PLANNED
from fourfold.spec.spec import Spec

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
    Rule("experts for a token", ("model.moe.top_k", "model.moe.experts"), rules_experts.moe_counts),
    Rule(
        "settings of the balance",
        ("model.moe.balance_weight", "model.moe.balance_speed", "model.moe.balance"),
        rules_experts.balance_is_used,
    ),
    Rule(
        "capacity for a token",
        ("model.moe.capacity_factor", "model.moe.experts", "model.moe.top_k", "data.sequence"),
        rules_experts.capacity_takes_tokens,
    ),
    Rule(
        "a configuration of transformers",
        ("model.architecture", "model.config", "model.args"),
        rules_huggingface.configured,
    ),
    Rule("tokens for a causal LM", ("model.kind", "data.kind"), rules_huggingface.reads_tokens),
    Rule(
        "draws that are ours", ("model.args", "model.config"), rules_huggingface.draws_nothing, owed="library"
    ),
    Rule(
        "attention that is ours",
        ("model.args", "model.config", "model.architecture"),
        rules_huggingface.attends_as_we_do,
        owed="not built",
    ),
    Rule("a loss over rows", ("model.args", "model.config"), rules_huggingface.balances_nothing),
    Rule("places for every token", ("model.args", "data.sequence"), rules_huggingface.position_table),
    Rule("a row for every byte", ("model.args", "data.kind"), rules_huggingface.byte_vocabulary),
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
    Rule("one auto degree", ("layout.dp_shard", "layout.dp_replicate"), rules_layout.one_auto),
    Rule("zero shards", ("layout.dp_shard", "layout.zero"), rules_layout.zero_shards),
    Rule(
        "zero over shards",
        ("layout.dp_shard", "layout.dp_replicate", "layout.zero", "layout.cp"),
        rules_layout.zero_has_ranks,
    ),
    Rule("units of zero", ("layout.wrap", "layout.zero"), rules_memory.wrap_needs_zero),
    Rule("units of blocks", ("layout.wrap", "model.layers"), rules_memory.wrap_has_blocks),
    Rule("prefetch of zero 3", ("layout.prefetch", "layout.zero"), rules_memory.prefetch_needs_zero_3),
    Rule(
        "units to prefetch",
        ("layout.prefetch", "layout.wrap", "layout.zero"),
        rules_memory.prefetch_has_units,
    ),
    Rule("offload of zero", ("layout.offload", "layout.zero"), rules_memory.offload_cpu_needs_zero),
    Rule(
        "operations to keep",
        ("layout.recompute_keep", "layout.recompute"),
        rules_recompute.keep_names_operations,
    ),
    Rule(
        "some operation to keep",
        ("layout.recompute_keep", "layout.recompute"),
        rules_recompute.keep_is_not_empty,
    ),
    Rule(
        "operations kept when recomputing",
        ("layout.recompute_keep", "layout.recompute"),
        rules_recompute.keep_is_used,
    ),
    Rule(
        "a backend that compiles", ("layout.compile_backend", "layout.compile"), rules_compile.backend_is_used
    ),
    Rule(
        "operations of compiled blocks",
        ("layout.recompute", "layout.compile"),
        rules_compile.compiled_keeps_no_operations,
        owed="not built",
    ),
    Rule(
        "one backward of compiled blocks",
        ("layout.compile", "layout.pp_schedule", "layout.pp"),
        rules_compile.compiled_goes_back_at_once,
        owed="library",
    ),
    Rule("files to offload to", ("layout.offload_dir", "layout.offload"), rules_memory.offload_dir_is_used),
    Rule("sp needs tp", ("layout.sp", "layout.tp"), rules_layout.sp_needs_tp),
    Rule("sp needs tokens", ("layout.sp", "model.kind", "data.kind"), rules_layout.sp_needs_tokens),
    Rule("cp needs tokens", ("layout.cp", "model.kind", "data.kind"), rules_context.cp_needs_tokens),
    Rule("cp cuts the sequence", ("layout.cp", "data.sequence"), rules_context.cp_divides_sequence),
    Rule(
        "ulysses cuts the heads",
        ("layout.cp_method", "layout.cp", "layout.tp", "model.heads", "model.kv_heads"),
        rules_context.ulysses_divides_heads,
    ),
    Rule(
        "stages of transformers",
        ("layout.pp", "model.kind"),
        rules_huggingface.without_stages,
        owed="library",
    ),
    Rule(
        "experts of transformers",
        ("layout.ep", "model.kind", "model.architecture"),
        rules_huggingface.without_experts_apart,
        owed="not built",
    ),
    Rule(
        "tp by the model's own plan",
        ("layout.tp", "model.kind", "model.architecture"),
        rules_huggingface.has_plan,
        owed="library",
    ),
    Rule(
        "tp cuts the configuration",
        ("layout.tp", "model.kind", "model.args"),
        rules_huggingface.tp_divides,
        owed="library",
    ),
    Rule(
        "cp of latent attention",
        ("layout.cp", "model.architecture"),
        rules_huggingface.cp_meets,
        owed="not built",
    ),
    Rule(
        "ulysses cuts the configuration",
        ("layout.cp_method", "layout.cp", "layout.tp", "model.args"),
        rules_huggingface.ulysses_divides,
    ),
    Rule("ep needs experts", ("layout.ep", "model.moe.experts"), rules_experts.ep_needs_experts),
    Rule(
        "tp keeps heads whole",
        ("layout.tp", "model.heads", "model.kv_heads"),
        rules_layout.tp_divides_heads,
        owed="library",
    ),
    Rule(
        "tp cuts the feed-forward",
        ("layout.tp", "model.ffn_width", "model.width"),
        rules_layout.tp_divides_ffn,
        owed="library",
    ),
    Rule(
        "tp cuts the experts",
        ("layout.tp", "layout.ep", "model.moe.expert_width", "model.moe.shared_experts"),
        rules_experts.tp_divides_experts,
        owed="not built",
    ),
    Rule("tp cuts the mlp", ("layout.tp", "model.hidden"), rules_layout.tp_divides_hidden, owed="not built"),
    Rule(
        "tokens for every tp rank",
        ("layout.tp", "model.vocabulary"),
        rules_layout.tp_fills_vocabulary,
        owed="library",
    ),
    Rule("a layer for every rank of a pipeline", ("layout.pp", "model.layers"), rules_pipeline.pp_has_layers),
    Rule(
        "a layer for every stage",
        ("layout.pp_schedule", "layout.pp_virtual", "layout.pp", "model.layers"),
        rules_pipeline.stages_have_layers,
    ),
    Rule(
        "stages of the schedule", ("layout.pp_virtual", "layout.pp_schedule"), rules_pipeline.virtual_stages
    ),
    Rule(
        "a stage for every layer",
        ("layout.pp_split", "layout.pp", "layout.pp_virtual", "model.layers"),
        rules_pipeline.split_fits,
    ),
    Rule(
        "parameters of split backwards",
        ("layout.zero", "layout.pp_schedule", "layout.pp"),
        rules_pipeline.splits_keep_parameters,
        owed="library",
    ),
    Rule(
        "microbatches of the schedule",
        ("batch.accumulation", "layout.pp_schedule", "layout.pp"),
        rules_pipeline.microbatches_fill,
    ),
    Rule(
        "schedule inside the run",
        ("optimizer.decay_steps", "optimizer.warmup_steps", "run.steps"),
        rules_training.schedule_fits,
    ),
    Rule(
        "loss scale of fp16",
        tuple(f"precision.{key}" for key in rules_precision.SCALE),
        rules_precision.scale_is_used,
    ),
    Rule(
        "TF32 of CUDA",
        ("precision.tf32", "precision.compute", "hardware.device"),
        rules_precision.tf32_is_for_cuda,
    ),
    Rule(
        "reduction in fp64", ("precision.reduce", "precision.compute"), rules_precision.fp64_reduces_in_fp64
    ),
    Rule(
        "reduction of replicas",
        ("precision.reduce", "layout.dp_replicate", "layout.dp_shard", "layout.zero", "layout.tp"),
        rules_precision.replicas_reduce_in_fp32,
        owed="library",
    ),
    *(
        Rule(
            f"exact without {axis}",
            ("run.exact", f"layout.{axis}"),
            partial(rules_exact.exact_without, axis),
            owed="not built",
        )
        for axis in rules_exact.INSIDE
    ),
    Rule(
        "exact on powers of two",
        ("run.exact", "layout.dp_replicate", "layout.dp_shard"),
        rules_exact.exact_halves,
    ),
    Rule("exact in wide sums", ("run.exact", "precision.reduce"), rules_exact.exact_reduces_wide),
    Rule("betas below one", ("optimizer.betas",), rules_training.betas_below_one),
    Rule("seed of 63 bits", ("run.seed",), rules_training.seed_fits),
    Rule("run.dir named", ("run.dir",), rules_training.dir_named),
    Rule(
        "tensors by their whole names",
        ("checkpoint.allow_missing", "checkpoint.allow_surplus"),
        rules_training.tensors_named,
    ),
    *(Rule(f"{row.key} not trained yet", (row.key,), row, "train", "not built") for row in PLANNED),
)


def check(
    spec: Spec,
    when: When = "train",
    provenance: Mapping[str, str] | None = None,
    world: int | None = None,
) -> list[Problem]:
    """Every rule that `spec` breaks: "always" only those no version can do, "train" those and what is not built yet.

    `provenance` (of the loaded Spec) says where the colliding settings stand. Where `world` is known, as it is of a
    settled layout, what to type instead of a layout is the nearest that is legal by the whole table, batch included.
    """
    broken = [
        (rule, problem)
        for rule in RULES
        if (rule.when == "always" or when == "train") and (problem := rule.find(spec)) is not None
    ]
    world = world_of(spec.layout) if world is None else world
    instead = ""
    if world is not None and any(about_degrees(rule) for rule, _ in broken):
        asked = as_asked(spec, provenance)
        instead = nearest(asked, world, _wanted(asked, when))
    places = provenance or {}
    return [
        replace(
            problem,
            where=place_of(rule.keys, places),
            instead=instead if instead and about_degrees(rule) else problem.instead,
        )
        for rule, problem in broken
    ]


def require(
    spec: Spec,
    when: When = "train",
    provenance: Mapping[str, str] | None = None,
    world: int | None = None,
) -> None:
    """Raise SpecError with every problem that `check` finds."""
    problems = check(spec, when, provenance, world)
    if problems:
        raise SpecError(problems)


def judge(spec: Spec, when: When = "always") -> Judge:
    """Whether other layouts of `spec` are legal.

    "always": by all rules that can never be broken, and by those of what is not built yet that `spec` itself keeps:
    who plans with an axis that is not built goes on doing so, and nobody else is sent there.
    """
    return Judge(spec, _wanted(spec, when))


def _wanted(spec: Spec, when: When) -> list[Rule]:
    return [rule for rule in RULES if rule.when == "always" or when == "train" or not rule.applies(spec)]


def place_of(keys: tuple[str, ...], provenance: Mapping[str, str]) -> str:
    """Where the colliding settings stand, by provenance; a `--set` rather than the file, for it came last."""
    places = [provenance[key] for key in keys if key in provenance]
    places += [place for path, place in provenance.items() if any(path.startswith(f"{key}.") for key in keys)]
    return min(places, key=lambda place: not place.startswith("--set"), default="")
