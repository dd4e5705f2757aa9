"""What a Hugging Face configuration says: the one place that asks transformers for one, and only when a Spec does.

Nothing is fetched: a configuration is a file on this machine, or an architecture's defaults, with `model.args` on top.
transformers brings torch along, so that a Spec of this kind is read in seconds, and every other without either.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.model import DecoderSpec, HuggingFaceSpec, ModelSpec

_OURS = (
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "model_type",
)  # keys that are no shape, and set elsewhere
# What drops, or draws, outside of our draws: see `rules_huggingface.draws_nothing`.
_DRAWS = ("drop", "jitter")
_OTHER_HEADS = ("summary_", "classifier_")  # keys of these are for heads that a causal LM has not


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules need to know of a configuration; `None` where it has no such number.

    hidden: features of a feed-forward. places: rows of a learned position table, and by what key. windows: layers that
    see some of the last tokens only. plan: of tensor parallel. draws: keys that ask for dropout or noise, and values.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    hidden: int | None
    vocabulary: int
    places: int | None
    places_key: str
    windows: int
    layer_types: tuple[str, ...]
    rope_types: tuple[str, ...]
    plan: tuple[tuple[str, str], ...]
    draws: tuple[tuple[str, float], ...]
    latent: bool
    softcap: float | None
    experts: int | None
    balances: bool


def facts_of(model: ModelSpec) -> Facts | None:
    """The facts of a Hugging Face model; None for another kind, and where there is no configuration to ask."""
    if not isinstance(model, HuggingFaceSpec):
        return None
    try:
        return facts(model)
    except SpecError:
        return None  # told by its own rule


def vocabulary_of(model: ModelSpec) -> tuple[str, int | None]:
    """The key that says how many tokens a model knows, and the number; None where only its data tell."""
    if isinstance(model, DecoderSpec):
        return "model.vocabulary", model.vocabulary
    known = facts_of(model)
    return "model.args.vocab_size", None if known is None else known.vocabulary


def facts(model: HuggingFaceSpec) -> Facts:
    """The facts of its configuration. Raises what `configuration` raises."""
    return _facts(model.model_dump_json())


def configuration(model: HuggingFaceSpec) -> Any:
    """A transformers configuration of its own, with `model.args` on top.

    Raises SpecError without transformers; for an architecture that is none, or has no causal LM; for a file that is
    not there or cannot be read; for keys and values of `model.args` that the configuration does not take.
    """
    _require_transformers(model)
    if (model.architecture is None) == (model.config is None):
        raise SpecError(_one_source(model))
    given = {} if model.config is None else read_config(model.config)
    architecture = model.architecture or given.pop("model_type", None)
    if not isinstance(architecture, str):
        raise SpecError(_untyped(model.config or ""))
    return _made(model, architecture, {key: value for key, value in given.items() if key not in _OURS})


def described(model: HuggingFaceSpec) -> Mapping[str, Any]:
    """The whole configuration, and the version of transformers whose code it is for."""
    import transformers

    given: dict[str, Any] = configuration(model).to_dict()
    return dict(sorted(given.items())) | {"transformers_version": transformers.__version__}


def config_file(config: str) -> Path:
    """The file that `model.config` names."""
    path = Path(config)
    return path / "config.json" if path.is_dir() else path


def read_config(config: str) -> dict[str, Any]:
    """What stands in the file of `model.config`. Raises SpecError where it is no JSON object that can be read."""
    path = config_file(config)
    asked = f'model.config = "{config}"'
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = sorted(path.parent.glob("*.json")) if path.parent.is_dir() else []
        raise SpecError(
            Problem(
                asked,
                found=(error.strerror or str(error)).lower() + f": {path}",
                why="it is a config.json as save_pretrained writes it, or the folder of one; nothing is fetched",
                instead=f"--set model.config={near[0]}" if near else "the path of one",
            )
        ) from error
    except ValueError as error:
        raise SpecError(
            Problem(asked, f"{path}: {error}", "it is no JSON", "a config.json of transformers")
        ) from error
    if not isinstance(given, dict):
        raise SpecError(
            Problem(
                asked, f"{path} holds a {type(given).__name__}", "it is no object of keys", "a config.json"
            )
        )
    return given


@lru_cache(maxsize=64)
def _facts(text: str) -> Facts:
    model = HuggingFaceSpec.model_validate_json(text)
    config = configuration(model)
    kinds = tuple(getattr(config, "layer_types", None) or ())
    layers, window = int(config.num_hidden_layers), getattr(config, "sliding_window", None)
    windows = kinds.count("sliding_attention") if kinds else (layers if window else 0)
    heads = int(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return Facts(
        architecture=config.model_type,
        layers=layers,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        hidden=_whole(getattr(config, "intermediate_size", None)),
        vocabulary=int(config.vocab_size),
        places=None if rope else _whole(getattr(config, "max_position_embeddings", None)),
        places_key=config.attribute_map.get("max_position_embeddings", "max_position_embeddings"),
        windows=windows if window else 0,
        layer_types=kinds,
        rope_types=tuple(sorted(_rope_types(rope))),
        plan=tuple((getattr(config, "base_model_tp_plan", None) or {}).items()),
        draws=tuple(_draws(config.to_dict())),
        latent=getattr(config, "kv_lora_rank", None) is not None,
        softcap=getattr(config, "attn_logit_softcapping", None),
        experts=_whole(experts),
        balances=bool(getattr(config, "output_router_logits", False)),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _rope_types(rope: object) -> set[str]:
    """Of all layers, or by kind of layer."""
    if not isinstance(rope, Mapping):
        return set()
    own = rope.get("rope_type")
    return {str(own)} if own else {kind for inner in rope.values() for kind in _rope_types(inner)}


def _draws(given: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [
        (key, float(value))
        for key, value in sorted(given.items())
        if any(word in key for word in _DRAWS)
        and not key.startswith(_OTHER_HEADS)
        and isinstance(value, int | float)
        and value > 0
    ]


def _made(model: HuggingFaceSpec, architecture: str, given: dict[str, Any]) -> Any:
    """The configuration, by transformers' own classes."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, logging

    logging.set_verbosity_error()  # it warns of tokens for generation, of which there is none here
    if architecture not in CONFIG_MAPPING:
        raise SpecError(_unknown(model, architecture, list(CONFIG_MAPPING)))
    kind = CONFIG_MAPPING[architecture]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        causal = [name for name in CONFIG_MAPPING if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING]
        raise SpecError(_not_causal(architecture, causal))
    plain = kind()
    known = {*plain.to_dict(), *(field.name for field in fields(kind)), *getattr(plain, "attribute_map", {})}
    known = {key for key in known if not key.startswith("_")} - set(_OURS)
    strange = [key for key in model.args if key not in known]
    if strange:
        # Some models read keys that their configuration does not name, as head_dim of qwen3_moe.
        code = inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[kind].__module__])
        strange = [key for key in strange if not re.search(rf"""(config\.|["']){re.escape(key)}\b""", code)]
    if strange:
        raise SpecError([_no_key(architecture, key, sorted(known)) for key in strange])
    try:
        config = kind(**{**given, **model.args})
    except Exception as error:  # whatever its own checks raise
        told = " ".join(str(error).split())
        raise SpecError(
            Problem(
                asked=f'model.kind = "huggingface" of {architecture} with model.args = {model.args}',
                found=f"{type(error).__name__}: {told}",
                why=f"transformers' {kind.__name__} does not take it",
                instead="values that it takes; its page in transformers' documentation lists them",
            )
        ) from error
    problem = _no_decoder(architecture, config, given)
    if problem is not None:
        raise SpecError(problem)
    return config


def _no_decoder(architecture: str, config: Any, given: Mapping[str, Any]) -> Problem | None:
    """What a model of text alone, with its weights as they are, has not."""
    asked = f'model.kind = "huggingface" of {architecture}'
    if not getattr(config, "num_attention_heads", None) or not getattr(config, "num_hidden_layers", None):
        why = "what goes from token to token in another way is not kept inside documents"
        return Problem(
            asked, "a configuration without layers of attention", why, "--set model.architecture=llama"
        )
    text = config.get_text_config()
    if text is not config:
        part = f"--set model.architecture={text.model_type}, its text model"
        return Problem(asked, "a model of several kinds of input", "data is text alone here", part)
    if getattr(config, "is_encoder_decoder", False):
        return Problem(asked, "an encoder and a decoder", "data is one row of tokens", "a decoder, as llama")
    if given.get("quantization_config") is not None:
        why = "weights are made and trained in fp32, or fp64 for proofs"
        return Problem(asked, "quantization_config in model.config", why, "a config.json without it")
    return None


def _require_transformers(model: HuggingFaceSpec) -> None:
    if importlib.util.find_spec("transformers") is not None:
        return
    named = model.architecture or model.config
    raise SpecError(
        Problem(
            asked=f'model.kind = "huggingface"{f" ({named})" if named else ""}',
            found="no transformers in this Python",
            why="it is an extra: nothing else needs it",
            instead="pip install 'fourfold[hf]'",
        )
    )


def _one_source(model: HuggingFaceSpec) -> Problem:
    both = model.config is not None
    return Problem(
        asked="model.architecture and model.config" if both else 'model.kind = "huggingface"',
        found=f'"{model.architecture}" and "{model.config}"'
        if both
        else "no model.architecture and no model.config",
        why="the shapes come from one configuration: a file's, or an architecture's defaults; model.args go on top",
        instead="leave model.architecture out" if both else "--set model.architecture=llama",
    )


def _untyped(config: str) -> Problem:
    return Problem(
        asked=f'model.config = "{config}"',
        found="no model_type in it",
        why="it says which of transformers' models the shapes are of",
        instead='"model_type": "llama" in the file',
    )


def _unknown(model: HuggingFaceSpec, architecture: str, known: list[str]) -> Problem:
    likely = next(iter(get_close_matches(architecture.lower(), known, n=1)), "llama")
    where = (
        f'model.architecture = "{architecture}"' if model.architecture else f'model.config = "{model.config}"'
    )
    return Problem(
        asked=where,
        found=f'no model_type "{architecture}" in the transformers that is installed',
        why="models are transformers' own; code that comes with a checkpoint (auto_map) is never run",
        instead=f"--set model.architecture={likely}"
        if model.architecture
        else f'"model_type": "{likely}" in the file',
    )


def _not_causal(architecture: str, causal: list[str]) -> Problem:
    near = get_close_matches(architecture, causal, n=1, cutoff=0.4)
    return Problem(
        asked=f'model.architecture = "{architecture}"',
        found="no causal LM among its models",
        why="a row's targets are its next tokens",
        instead=f"--set model.architecture={near[0] if near else 'llama'}",
    )


def _no_key(architecture: str, key: str, known: list[str]) -> Problem:
    near = get_close_matches(key, known, n=1, cutoff=0.75)  # a slip of the pen, not another word
    return Problem(
        asked=f"model.args.{key}",
        found=f"no such key in the configuration of {architecture}",
        why="transformers would take it and silently ignore it",
        instead=(f"model.args.{near[0]}" if near else "one of " + ", ".join(known[:12]) + ", ...")
        + "; or [model.args] without it, whole: --set 'model.args={...}'",
    )
