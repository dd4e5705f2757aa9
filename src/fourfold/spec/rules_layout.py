"""Rules about `[layout]` and what it cuts. Each function gives the problem, or None (see `rules`).

What is typed instead here is for a world size that is not known yet; where it is known, `rules.check` computes the
nearest legal layouts for it by asking the whole table.
"""

from __future__ import annotations

from fourfold.spec.degrees import divisors
from fourfold.spec.errors import Problem
from fourfold.spec.model import DecoderSpec, MlpSpec
from fourfold.spec.rules_model import decoder_of, either, multiples_near
from fourfold.spec.spec import Spec
from fourfold.spec.widths import ffn_width
from fourfold.spec.words import counted


def one_auto(spec: Spec) -> Problem | None:
    if spec.layout.dp_replicate != "auto" or spec.layout.dp_shard != "auto":
        return None
    return Problem(
        asked='layout.dp_replicate = "auto" and layout.dp_shard = "auto"',
        found="two degrees to be found from one world size",
        why='"auto" is what the other degrees leave over, so only one can be it',
        instead="--set layout.dp_replicate=1 or --set layout.dp_shard=1",
    )


def zero_shards(spec: Spec) -> Problem | None:
    layout = spec.layout
    if layout.zero or layout.dp_shard in (1, "auto"):
        return None
    return Problem(
        asked=f"layout.dp_shard = {layout.dp_shard} with layout.zero = 0",
        found="ranks to shard over, and nothing to shard",
        why="zero = 0 keeps every tensor whole; zero 1, 2 and 3 shard moments, gradients and parameters in turn",
        instead=f"--set layout.zero=3 or --set layout.dp_shard=1 --set layout.dp_replicate={layout.dp_shard}",
    )


def zero_has_ranks(spec: Spec) -> Problem | None:
    layout = spec.layout
    if not layout.zero or layout.dp_shard != 1 or layout.cp > 1 or layout.dp_replicate in (1, "auto"):
        return None
    return Problem(
        asked=f"layout.zero = {layout.zero} with layout.dp_replicate = {layout.dp_replicate} and layout.dp_shard = 1",
        found="something to shard, and no ranks to shard it over",
        why="moments, gradients and parameters are cut over dp_shard; dp_replicate holds copies of the shards",
        instead=f"--set layout.dp_shard={layout.dp_replicate} --set layout.dp_replicate=1 or --set layout.zero=0",
    )


def sp_needs_tp(spec: Spec) -> Problem | None:
    if not spec.layout.sp or spec.layout.tp > 1:
        return None
    above = [tp for tp in _legal_degrees(spec, 2) if tp > 1] if sp_needs_tokens(spec) is None else []
    return Problem(
        asked="layout.sp = true with layout.tp = 1",
        found="no tensor-parallel ranks to share the sequence among",
        why="sequence parallel is a property of tensor parallel",
        instead=" or ".join(["--set layout.sp=false", *(f"--set layout.tp={tp}" for tp in above[:1])]),
    )


def sp_needs_tokens(spec: Spec) -> Problem | None:
    """A sequence of any length can be cut; a row of features is none."""
    vectors = isinstance(spec.model, MlpSpec) or spec.data.kind == "synthetic"
    if not spec.layout.sp or not vectors:
        return None
    return Problem(
        asked=f'layout.sp = true with model.kind = "{spec.model.kind}" and data.kind = "{spec.data.kind}"',
        found="vectors, which have no sequence",
        why="sequence parallel gives every tensor-parallel rank other tokens of a sample",
        instead="--set layout.sp=false",
    )


def tp_divides_heads(spec: Spec) -> Problem | None:
    """Whole heads a rank; a key/value head may be copied to several ranks, never cut."""
    model, tp = decoder_of(spec), spec.layout.tp
    if model is None or _cuts_heads(model, tp):
        return None
    kv = _kv_heads(model)
    heads = f"model.heads = {model.heads}" + (f" and model.kv_heads = {kv}" if kv != model.heads else "")
    return Problem(
        asked=f"layout.tp = {tp} with {heads}",
        found=f"{counted(model.heads, 'head')} and {counted(kv, 'key/value head')}, of which some would be cut",
        why="tensor parallel gives every rank whole heads, equally many: tp divides heads, and kv_heads or is a "
        "multiple of them (torch's DTensor puts parts together as if they were equal)",
        instead=either("layout.tp", _legal_degrees(spec, tp)),
    )


def tp_divides_ffn(spec: Spec) -> Problem | None:
    """A mixture of experts has this feed-forward in its leading layers only."""
    model, tp = decoder_of(spec), spec.layout.tp
    if model is None or _cuts_ffn(model, tp):
        return None
    hidden = ffn_width(model)
    by_default = "" if model.ffn_width else f", the default for width {model.width}"
    return Problem(
        asked=f"layout.tp = {tp} with model.ffn_width = {hidden}{by_default}",
        found=f"{counted(hidden, 'hidden feature')}, which make no such number of equal parts",
        why="tensor parallel gives every rank equally many hidden features of the feed-forward (torch's DTensor puts "
        "parts together as if they were equal)",
        instead=either("layout.tp", _legal_degrees(spec, tp))
        + f" or {either('model.ffn_width', multiples_near(hidden, tp))}",
    )


def tp_divides_hidden(spec: Spec) -> Problem | None:
    """Only the hidden width is cut: inputs and outputs of the mlp may be of any size."""
    model, tp = spec.model, spec.layout.tp
    if not isinstance(model, MlpSpec) or model.hidden % tp == 0:
        return None
    return Problem(
        asked=f"layout.tp = {tp} with model.hidden = {model.hidden}",
        found=f"{counted(model.hidden, 'hidden feature')}, which make no such number of equal parts",
        why="every rank gets equally many hidden features; unequal parts are not built",
        instead=either("layout.tp", _legal_degrees(spec, tp))
        + f" or {either('model.hidden', multiples_near(model.hidden, tp))}",
    )


def tp_fills_vocabulary(spec: Spec) -> Problem | None:
    """Rows of the vocabulary may be uneven (see `plan.notes`), but each rank needs one."""
    model, tp = decoder_of(spec), spec.layout.tp
    if model is None or _cuts_vocabulary(model, tp):
        return None
    return Problem(
        asked=f"layout.tp = {tp} with model.vocabulary = {model.vocabulary}",
        found=f"{counted(model.vocabulary, 'token')}, which leave a rank without any",
        why=f"ranks take {-(-model.vocabulary // tp)} of them each, in turn, as torch's DTensor cuts; torch's "
        "loss_parallel fails where a rank has none",
        instead=either("layout.tp", _legal_degrees(spec, tp)),
    )


def _kv_heads(model: DecoderSpec) -> int:
    return model.heads if model.mla is not None else model.kv_heads or model.heads


def _cuts_heads(model: DecoderSpec, tp: int) -> bool:
    kv = _kv_heads(model)
    return tp == 1 or (model.heads % tp == 0 and (kv % tp == 0 or tp % kv == 0))


def _cuts_ffn(model: DecoderSpec, tp: int) -> bool:
    dense = model.moe is None or model.moe.first_dense_layers > 0
    return not dense or ffn_width(model) % tp == 0


def _cuts_vocabulary(model: DecoderSpec, tp: int) -> bool:
    return -(-model.vocabulary // tp) * (tp - 1) < model.vocabulary


def _legal_degrees(spec: Spec, near: int) -> list[int]:
    """Degrees of tp that cut the model, next below and above `near`."""
    model = spec.model
    if isinstance(model, DecoderSpec):
        tests = (_cuts_heads, _cuts_ffn, _cuts_vocabulary)
        legal = [tp for tp in divisors(model.heads) if all(test(model, tp) for test in tests)]
    elif isinstance(model, MlpSpec):
        legal = divisors(model.hidden)
    else:
        legal = [near]
    return [max(tp for tp in legal if tp <= near), *[tp for tp in legal if tp > near][:1]]
