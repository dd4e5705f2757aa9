"""Rules about `[model]`: heads, positions, experts. Each function gives the problem, or None (see `rules`)."""

from __future__ import annotations

from fourfold.spec.degrees import nearest_divisors
from fourfold.spec.errors import Problem
from fourfold.spec.model import DecoderSpec, MlpSpec, MoeSpec
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted


def decoder_of(spec: Spec) -> DecoderSpec | None:
    """The model, if it is a decoder."""
    return spec.model if isinstance(spec.model, DecoderSpec) else None


def moe_of(spec: Spec) -> MoeSpec | None:
    """The experts of a decoder that has any."""
    return spec.model.moe if isinstance(spec.model, DecoderSpec) else None


def either(key: str, values: list[int]) -> str:
    """`--set` of each value in turn."""
    return " or ".join(f"--set {key}={value}" for value in values)


def multiples_near(number: int, unit: int) -> list[int]:
    """The positive multiples of `unit` next below and above `number`."""
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def kv_heads(spec: Spec) -> Problem | None:
    """Each key/value head serves the same number of query heads (Ainslie et al., arXiv 2305.13245)."""
    model = decoder_of(spec)
    if model is None or model.mla is not None or model.kv_heads is None or model.heads % model.kv_heads == 0:
        return None
    more = model.kv_heads > model.heads
    return Problem(
        asked=f"model.kv_heads = {model.kv_heads} with model.heads = {model.heads}",
        found="more key/value heads than heads"
        if more
        else f"{model.heads} / {model.kv_heads} is no whole number",
        why="every key/value head is shared by equally many query heads",
        instead=either("model.kv_heads", nearest_divisors(model.heads, model.kv_heads)),
    )


def head_width(spec: Spec) -> Problem | None:
    model = decoder_of(spec)
    if (
        model is None
        or model.mla is not None
        or model.head_width is not None
        or model.width % model.heads == 0
    ):
        return None
    heads = nearest_divisors(model.width, model.heads)
    widths = multiples_near(model.width, model.heads * (2 if model.positions == "rotary" else 1))
    return Problem(
        asked=f"model.width = {model.width} with model.heads = {model.heads}",
        found=f"{model.width} / {model.heads} is no whole number",
        why="a head is width / heads features wide unless model.head_width says otherwise",
        instead=f"{either('model.width', widths)} or {either('model.heads', heads)}",
    )


def even_rotary(spec: Spec) -> Problem | None:
    """Rotary positions turn pairs of features (Su et al., arXiv 2104.09864)."""
    model = decoder_of(spec)
    if model is None or model.positions != "rotary":
        return None
    if model.mla is not None:
        key, width = "model.mla.rope_head_width", model.mla.rope_head_width
    elif model.head_width is None and model.width % model.heads:
        return None
    else:
        key, width = "model.head_width", model.head_width or model.width // model.heads
    if width % 2 == 0:
        return None
    return Problem(
        asked='model.positions = "rotary"',
        found=f"heads of {counted(width, 'feature')}",
        why="rotary positions turn features in pairs, so a head needs an even number of them",
        instead=either(key, multiples_near(width, 2)),
    )


def learned_positions(spec: Spec) -> Problem | None:
    model = decoder_of(spec)
    sequence = getattr(spec.data, "sequence", None)
    if model is None:
        return None
    if model.positions == "rotary":
        if model.max_sequence is None:
            return None
        return Problem(
            asked=f'model.max_sequence = {model.max_sequence} with model.positions = "rotary"',
            found="a length of a position table, and no table",
            why="rotary positions have no table, so the setting would be silently ignored",
            instead="leave model.max_sequence out; the length of a sample is data.sequence",
        )
    if model.max_sequence is not None and (sequence is None or model.max_sequence >= sequence):
        return None
    return Problem(
        asked='model.positions = "learned"',
        found=f"model.max_sequence = {model.max_sequence}" if model.max_sequence else "no model.max_sequence",
        why=f"the position table needs a row for each of the data.sequence = {sequence} tokens",
        instead=f"--set model.max_sequence={sequence or 1024}",
    )


def mla_alone(spec: Spec) -> Problem | None:
    """Latent attention brings its own head widths and rotary part (arXiv 2405.04434, section 2.1)."""
    model = decoder_of(spec)
    if model is None or model.mla is None:
        return None
    idle = [key for key in ("kv_heads", "head_width") if getattr(model, key) is not None]
    if model.positions == "rotary" and not idle:
        return None
    asked = [f"model.{key}" for key in idle] or ['model.positions = "learned"']
    return Problem(
        asked=f"{' and '.join(asked)} with [model.mla]",
        found="latent attention, which sets its head widths itself and is rotary in part",
        why="the setting would be silently ignored",
        instead="leave it out" if idle else "--set model.positions=rotary",
    )


def mlp_classes(spec: Spec) -> Problem | None:
    model = spec.model
    if not isinstance(model, MlpSpec) or model.task != "classification" or model.outputs > 1:
        return None
    return Problem(
        asked='model.task = "classification" with model.outputs = 1',
        found="one class",
        why="with one class there is nothing to tell apart: the loss is always 0",
        instead="--set model.outputs=2",
    )
