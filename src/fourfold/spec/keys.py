"""Every key a Spec can have, with what it expects; and the nearest one to a key that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

SECTIONS_OF_KINDS = ("model", "data")  # sections whose keys depend on their `kind`
DEFAULT_KINDS = {"model": "decoder", "data": "stdlib"}

# What these settings are called elsewhere (transformers, DeepSpeed, Megatron-LM, torchtitan, nanoGPT).
SYNONYMS = {
    "model.layers": ("num_layers", "n_layers", "n_layer", "num_hidden_layers", "depth"),
    "model.width": ("hidden_size", "d_model", "n_embd", "dim", "hidden", "embed_dim"),
    "model.heads": ("num_heads", "n_heads", "n_head", "num_attention_heads"),
    "model.kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_query_groups"),
    "model.head_width": ("head_dim", "head_size"),
    "model.ffn_width": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "d_ff", "mlp_width"),
    "model.vocabulary": ("vocab_size", "vocab", "n_vocab", "padded_vocab_size"),
    "model.tied": ("tie_word_embeddings", "tie_embeddings", "tied_embeddings", "weight_tying"),
    "model.biases": ("bias", "use_bias", "add_bias"),
    "model.rope_theta": ("rope_base", "rotary_base", "theta"),
    "model.max_sequence": ("max_position_embeddings", "n_positions"),
    "model.init_std": ("initializer_range", "init_method_std"),
    "model.moe.experts": ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "num_moe_experts"),
    "model.moe.top_k": ("num_experts_per_tok", "experts_per_token", "moe_router_topk", "router_topk"),
    "model.moe.shared_experts": ("n_shared_experts", "num_shared_experts"),
    "model.moe.expert_width": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "model.moe.first_dense_layers": ("first_k_dense_replace",),
    "model.moe.balance_weight": ("router_aux_loss_coef", "aux_loss_coef", "moe_aux_loss_coeff", "aux_loss_alpha"),
    "model.moe.balance_speed": ("bias_update_speed", "moe_router_bias_update_rate", "load_balance_coeff"),
    "model.moe.capacity_factor": ("expert_capacity_factor", "moe_expert_capacity_factor"),
    "data.sequence": ("seq_len", "seq_length", "sequence_length", "max_seq_len", "context", "context_length",
                      "block_size", "max_length"),
    "data.workers": ("num_workers", "dataloader_num_workers", "loader_workers"),
    "data.last_batch": ("drop_last",),
    "data.validation_fraction": ("val_fraction", "val_split", "validation_split"),
    "batch.global_batch": ("batch_size", "global_batch_size", "train_batch_size", "batch"),
    "batch.micro_batch": ("micro_batch_size", "train_micro_batch_size_per_gpu", "local_batch_size",
                          "per_device_train_batch_size", "per_device_batch_size"),
    "batch.accumulation": ("gradient_accumulation_steps", "grad_accum", "gradient_accumulation", "grad_accumulation",
                           "accumulation_steps", "accumulate_grad_batches"),
    "optimizer.lr": ("learning_rate", "max_lr", "peak_lr"),
    "optimizer.betas": ("beta1", "beta2", "adam_beta1", "adam_beta2"),
    "optimizer.eps": ("epsilon", "adam_epsilon"),
    "optimizer.weight_decay": ("wd", "decay"),
    "optimizer.clip_norm": ("grad_clip", "max_grad_norm", "gradient_clipping", "clip_grad", "max_norm"),
    "optimizer.schedule": ("lr_scheduler_type", "scheduler", "lr_schedule", "lr_decay_style"),
    "optimizer.warmup_steps": ("warmup", "warmup_iters", "lr_warmup_iters", "num_warmup_steps"),
    "optimizer.final_lr_share": ("min_lr", "min_lr_ratio", "min_lr_factor"),
    "precision.compute": ("dtype", "precision", "mixed_precision", "bf16", "fp16", "torch_dtype"),
    "precision.parameters": ("param_dtype", "params_dtype"),
    "precision.reduce": ("reduce_dtype", "grad_reduce_dtype", "communication_data_type", "buffer_dtype"),
    "precision.output": ("output_dtype", "logits_dtype"),
    "precision.scale_start": ("loss_scale", "init_scale", "initial_scale", "initial_loss_scale"),
    "precision.scale_growth": ("growth_factor",),
    "precision.scale_every": ("growth_interval", "loss_scale_window", "scale_window"),
    "precision.scale_backoff": ("backoff_factor",),
    "layout.pp": ("pipeline_parallel_degree", "pipeline_model_parallel_size"),
    "layout.dp_replicate": ("dp", "data_parallel", "data_parallel_replicate_degree"),
    "layout.dp_shard": ("fsdp", "data_parallel_shard_degree"),
    "layout.cp": ("context_parallel_degree", "context_parallel_size"),
    "layout.tp": ("tensor_parallel_degree", "tensor_model_parallel_size", "tensor_parallel"),
    "layout.ep": ("expert_parallel_degree", "expert_model_parallel_size"),
    "layout.zero": ("zero_stage", "stage", "zero_optimization"),
    "layout.sp": ("sequence_parallel",),
    "layout.unused_parameters": ("find_unused_parameters",),
    "layout.recompute": ("activation_checkpointing", "gradient_checkpointing", "activation_checkpoint", "ac_mode",
                         "recompute_granularity", "selective_ac_option", "activations_checkpoint_granularity"),
    "layout.compile": ("torch_compile", "compile_model", "use_compile", "dynamo"),
    "layout.compile_backend": ("torch_compile_backend", "dynamo_backend"),
    "layout.recompute_keep": ("recompute_modules", "ops_to_save", "save_list"),
    "layout.bucket_mib": ("bucket_cap_mb", "bucket_mb", "bucket_size_mb"),
    "checkpoint.every": ("save_every", "save_steps", "save_interval", "checkpoint_every"),
    "run.steps": ("max_steps", "iterations", "train_iters", "max_iters", "training_steps", "num_steps", "epochs"),
    "run.dir": ("output_dir", "out_dir", "run_dir", "dump_folder"),
    "run.exact": ("deterministic",),
    "run.log_every": ("logging_steps", "log_interval", "log_freq"),
    "run.validate_every": ("eval_steps", "eval_interval", "eval_every", "val_every"),
    "run.validation_batches": ("eval_iters", "eval_batches"),
    "run.timeout_s": ("timeout",),
    "hardware.threads_per_rank": ("num_threads", "omp_num_threads", "threads"),
    "hardware.devices_per_node": ("gpus_per_node", "nproc_per_node"),
}  # fmt: skip
SECTION_SYNONYMS = {
    "training": "run", "train": "run", "trainer": "run", "general": "run", "dataset": "data", "optim": "optimizer",
    "parallel": "layout", "parallelism": "layout", "mesh": "layout", "ckpt": "checkpoint", "device": "hardware",
}  # fmt: skip
_PATTERNS = {
    "name": "text of letters, digits and . _ -",
    "model.target": 'text such as "package.module:factory"',
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key: `path` dotted from the top (list items have no number), `kinds` those of its section that have it."""

    path: str
    kinds: tuple[str, ...]
    expects: str

    @property
    def section(self) -> str:
        """The table it stands in; "" at the top of the file."""
        return self.path.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]


@cache
def json_schema() -> dict[str, Any]:
    """The JSON Schema of a Spec (draft 2020-12)."""
    from fourfold.spec.spec import Spec

    return Spec.model_json_schema()


@cache
def keys() -> Mapping[str, Key]:
    """Every key by path; a section is a key too."""
    found: dict[str, Key] = {}
    for key in _walk(json_schema(), "", ()):
        known = found.get(key.path)
        if known is not None:
            all_kinds = (*known.kinds, *key.kinds)
            key = Key(key.path, all_kinds, _either(all_kinds) if key.leaf == "kind" else known.expects)
        found[key.path] = key
    return found


@cache
def sections() -> tuple[str, ...]:
    """The top tables: model, data, batch, ..."""
    return tuple(json_schema()["properties"].keys() - {"name", "note"})


@cache
def kinds(section: str) -> tuple[str, ...]:
    """The kinds of `[model]` or `[data]`; () elsewhere."""
    if section not in SECTIONS_OF_KINDS:
        return ()
    return tuple(json_schema()["properties"][section]["discriminator"]["mapping"])


def has_key(path: str, kind: str | None = None) -> bool:
    """Whether `path` exists, for a section of this kind."""
    key = keys().get(path)
    return key is not None and (kind is None or not key.kinds or kind in key.kinds)


def nearest_key(path: str, kind: str | None = None) -> Key | None:
    """The key probably meant by `path`: the same name in its place, elsewhere, by a synonym, or spelt alike.

    `kind` is that of the section `path` names, if it has kinds: keys of other kinds are not offered there.
    """
    section, _, leaf = path.rpartition(".")
    offered = {
        key.path: key
        for key in keys().values()
        if key.path not in sections() and (kind is None or key.section != section or has_key(key.path, kind))
    }
    if path in offered:
        return offered[path]
    elsewhere = [
        key for key in offered.values() if key.leaf == leaf and not key.path.startswith("data.transforms.")
    ]
    if elsewhere:
        return elsewhere[0]
    for key in offered.values():
        if is_synonym(leaf, key):
            return key
    here = [key.leaf for key in offered.values() if key.section == section]
    close = difflib.get_close_matches(leaf, here, n=1, cutoff=0.6)
    if close:
        return offered[f"{section}.{close[0]}" if section else close[0]]
    by_leaf = {key.leaf: key for key in offered.values()}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)
    return by_leaf[close[0]] if close else None


def is_synonym(name: str, key: Key) -> bool:
    """Whether `name` is what another framework calls `key`."""
    return name.lower().replace("-", "_") in SYNONYMS.get(key.path, ())


def nearest_section(name: str) -> str | None:
    """The section probably meant by `name`."""
    if name in SECTION_SYNONYMS:
        return SECTION_SYNONYMS[name]
    close = difflib.get_close_matches(name, sections(), n=1, cutoff=0.6)
    return close[0] if close else None


def _walk(node: dict[str, Any], path: str, kinds_here: tuple[str, ...]) -> Iterator[Key]:
    node = _follow(node)
    if path:
        yield Key(path, kinds_here, _PATTERNS.get(path) or _expects(node))
    if "discriminator" in node:
        for kind, reference in node["discriminator"]["mapping"].items():
            yield from _fields({"$ref": reference}, path, (kind,))
        return
    for option in node.get("anyOf", ()):
        yield from _fields(option, path, kinds_here)
    if "items" in node:
        yield from _fields(node["items"], path, kinds_here)
    yield from _fields(node, path, kinds_here)


def _fields(node: dict[str, Any], path: str, kinds_here: tuple[str, ...]) -> Iterator[Key]:
    for name, field in _follow(node).get("properties", {}).items():
        yield from _walk(field, f"{path}.{name}" if path else name, kinds_here)


def _follow(node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    if reference is None:
        return node
    target: dict[str, Any] = json_schema()["$defs"][reference.rpartition("/")[2]]
    return target


def _expects(node: dict[str, Any]) -> str:
    """What a JSON Schema node takes, in words."""
    node = _follow(node)
    if "anyOf" in node:
        return " or ".join(_expects(option) for option in node["anyOf"] if option.get("type") != "null")
    if "const" in node:
        return toml_word(node["const"])
    if "enum" in node:
        return _either(node["enum"])
    kind = node.get("type")
    if kind in ("integer", "number"):
        return _number(node, "a whole number" if kind == "integer" else "a number")
    if kind == "array" and "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])}, each {_expects(node['prefixItems'][0])}"
    if kind == "array" and node.get("items", {}).get("type") == "string":
        return "a list of texts in quotes"
    if kind == "array" and node.get("items", {}).get("type") in ("integer", "number"):
        return f"a list, each {_expects(node['items'])}"
    words_of = {"boolean": "true or false", "string": "text in quotes", "array": "a list of tables"}
    return words_of.get(str(kind), "a section of keys")


def _either(values: Sequence[object]) -> str:
    words = [toml_word(value) for value in values]
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _number(node: dict[str, Any], word: str) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    if above is not None and node["type"] == "integer":
        low, above = above + 1, None
    if above is not None:
        end = (
            f", up to {high:g}" if high is not None else f" and below {below:g}" if below is not None else ""
        )
        return f"{word} above {above:g}{end}"
    end = f"to {high:g}" if high is not None else f"to below {below:g}" if below is not None else "up"
    if low is not None:
        return f"{word} from {low:g} {end}"
    return word if end == "up" else f"{word} up {end}"


def toml_word(value: object) -> str:
    """`value` as TOML writes it on one line."""
    import json

    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # TOML escapes it, JSON need not
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_word(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{toml_key(key)} = {toml_word(item)}' for key, item in value.items())}}}"
    return str(value)


def toml_key(key: str) -> str:
    """`key` as TOML writes it: bare, or in quotes."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_word(key)
