"""Rules about models of transformers, by their configuration. Each function gives the problem, or None."""

from __future__ import annotations

from fourfold.spec.data import SyntheticDataSpec
from fourfold.spec.degrees import divisors
from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.huggingface import Facts, facts, facts_of
from fourfold.spec.model import HuggingFaceSpec
from fourfold.spec.rules_data import BYTE_DATA, BYTES
from fourfold.spec.rules_model import either
from fourfold.spec.spec import Spec
from fourfold.spec.words import counted

# What each style of a plan of transformers is here: a rule of a sharding table, as far as there is one.
STYLES = {
    "colwise": "Heads",
    "rowwise": "row",
    "colwise_gather_output": "vocabulary",  # of the head alone: the loss takes its logits cut
    "colwise_rep": "vocabulary",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "within heads",
    "sequence_parallel": "replicate",
    "replicate": "replicate",
}
_KINDS = ("full_attention", "sliding_attention")
_MOVING = ("dynamic", "longrope")  # rotary turns that depend on how long the row is


def configured(spec: Spec) -> Problem | None:
    """There is a configuration, and it can be read."""
    if not isinstance(spec.model, HuggingFaceSpec):
        return None
    try:
        facts(spec.model)
    except SpecError as error:
        return error.problems[0]
    return None


def reads_tokens(spec: Spec) -> Problem | None:
    if not isinstance(spec.model, HuggingFaceSpec) or not isinstance(spec.data, SyntheticDataSpec):
        return None
    return Problem(
        asked='model.kind = "huggingface" with data.kind = "synthetic"',
        found="vectors",
        why="a causal LM reads tokens",
        instead="--set data.kind=stdlib",
    )


def draws_nothing(spec: Spec) -> Problem | None:
    """Dropout as transformers does it comes from torch's random stream."""
    known = facts_of(spec.model)
    if known is None or not known.draws:
        return None
    asked = ", ".join(f"{key} = {value:g}" for key, value in known.draws)
    return Problem(
        asked=f"dropout or noise of {known.architecture}: {asked}",
        found="draws from torch's random stream",
        why="transformers calls torch's dropout itself: what is dropped would depend on how many ranks there are, and "
        "no layout could be held against one device",
        instead=" ".join(f"--set model.args.{key}=0.0" for key, _ in known.draws),
    )


def attends_as_we_do(spec: Spec) -> Problem | None:
    """Attention that ours can stand in for: causal, inside documents, in a window or not."""
    known = facts_of(spec.model)
    if known is None:
        return None
    asked = f'model.kind = "huggingface" of {known.architecture}'
    strange = sorted(set(known.layer_types) - set(_KINDS))
    if strange:
        found = "layer_types " + ", ".join(strange)
        why = "what goes from token to token there is not masked between the documents of a row"
        return Problem(asked, found, why, "layers of " + " and ".join(_KINDS))
    if known.softcap is not None:
        found = f"attn_logit_softcapping = {known.softcap:g}"
        why = "torch's attention kernel, which serves every layout here, bends no scores"
        return Problem(asked, found, why, "gemma3_text, which has none, or another architecture")
    moving = [kind for kind in known.rope_types if kind in _MOVING]
    if moving:
        found = f'rotary positions of rope_type "{moving[0]}"'
        why = "its turns follow the longest row seen so far: layouts see other rows together"
        return Problem(asked, found, why, 'rope_type "default", "linear", "llama3" or "yarn"')
    return None


def balances_nothing(spec: Spec) -> Problem | None:
    known = facts_of(spec.model)
    if known is None or not known.balances:
        return None
    return Problem(
        asked=f"output_router_logits = true of {known.architecture}",
        found="an auxiliary loss over all tokens of a microbatch",
        why="it is no sum over rows: its value depends on which rows are together, so that no two layouts agree",
        instead='--set model.args.output_router_logits=false or model.kind = "decoder" with [model.moe]',
    )


def position_table(spec: Spec) -> Problem | None:
    known, sequence = facts_of(spec.model), getattr(spec.data, "sequence", None)
    if known is None or known.places is None or sequence is None or known.places >= sequence:
        return None
    return Problem(
        asked=f"data.sequence = {sequence} with {known.architecture}",
        found=f"a position table of {known.places} rows ({known.places_key})",
        why="it needs a row for each token of a sample",
        instead=f"--set model.args.{known.places_key}={sequence} or --set data.sequence={known.places}",
    )


def without_stages(spec: Spec) -> Problem | None:
    if spec.layout.pp == 1 or not isinstance(spec.model, HuggingFaceSpec):
        return None
    return Problem(
        asked=f'layout.pp = {spec.layout.pp} with model.kind = "huggingface"',
        found="a forward that runs all of its layers",
        why="a stage has some blocks and None for the others; transformers' models do not run in parts",
        instead="--set layout.pp=1" + _refilled(spec),
    )


def without_experts_apart(spec: Spec) -> Problem | None:
    if spec.layout.ep == 1 or not isinstance(spec.model, HuggingFaceSpec):
        return None
    return Problem(
        asked=f'layout.ep = {spec.layout.ep} with model.kind = "huggingface"',
        found="experts, if it has any, that transformers routes to itself",
        why="tokens are exchanged between ranks by a router of ours",
        instead='--set layout.ep=1 or model.kind = "decoder" with [model.moe]',
    )


def has_plan(spec: Spec) -> Problem | None:
    """Tensor parallel goes by the model's own plan."""
    known, tp = facts_of(spec.model), spec.layout.tp
    if known is None or tp == 1:
        return None
    asked = f"layout.tp = {tp} with {known.architecture}"
    instead = "--set layout.tp=1" + _refilled(spec)
    if not known.plan:
        found = "no base_model_tp_plan in its configuration"
        return Problem(asked, found, "transformers does not say which of its layers may be cut", instead)
    named = {style: name for name, style in reversed(known.plan) if not _translated(style)}
    if not named:
        return None
    found = ", ".join(f'"{style}" for {name}' for style, name in named.items())
    why = "transformers' plan cuts in ways that no rule of a sharding table says: " + (
        "experts in stacks that are not ours"
        if known.experts
        else "outputs that are put together, then taken apart"
    )
    return Problem(asked, found, why, instead)


def tp_divides(spec: Spec) -> Problem | None:
    """Whole heads a rank, equally many; a key/value head may be copied to several ranks, never cut."""
    known, tp = facts_of(spec.model), spec.layout.tp
    if known is None or tp == 1 or _cuts(known, tp):
        return None
    legal = [n for n in divisors(known.heads) if _cuts(known, n)]
    near = [max(n for n in legal if n <= tp), *[n for n in legal if n > tp][:1]]
    hidden = "" if known.hidden is None else f", {counted(known.hidden, 'hidden feature')}"
    return Problem(
        asked=f"layout.tp = {tp} with {known.architecture}",
        found=f"{counted(known.heads, 'head')}, {counted(known.kv_heads, 'key/value head')}{hidden}, a vocabulary of "
        f"{known.vocabulary}",
        why="every rank gets whole heads and features, equally many (torch's DTensor puts parts together as if they "
        "were equal), and a row of the vocabulary; key/value heads divide, or each is whole on equally many ranks",
        instead=either("layout.tp", near),
    )


def cp_meets(spec: Spec) -> Problem | None:
    """Keys and values travel together, as one tensor."""
    known = facts_of(spec.model)
    if known is None or spec.layout.cp == 1 or not known.latent:
        return None
    return Problem(
        asked=f"layout.cp = {spec.layout.cp} with {known.architecture}",
        found="latent attention (kv_lora_rank): keys and values of different widths",
        why="context parallel sends them as one tensor",
        instead="--set layout.cp=1" + _refilled(spec),
    )


def ulysses_divides(spec: Spec) -> Problem | None:
    known, layout = facts_of(spec.model), spec.layout
    if known is None or layout.cp == 1 or layout.cp_method != "ulysses":
        return None
    heads, kv = known.heads // layout.tp, max(known.kv_heads // layout.tp, 1)
    if heads % layout.cp == 0 and (kv % layout.cp == 0 or layout.cp % kv == 0):
        return None
    return Problem(
        asked=f'layout.cp_method = "ulysses" with layout.cp = {layout.cp}',
        found=f"{counted(heads, 'head')} and {counted(kv, 'key/value head')} on a rank, of which some would be cut",
        why="tokens are exchanged for heads: each rank attends with equally many whole ones",
        instead="--set layout.cp_method=gather",
    )


def byte_vocabulary(spec: Spec) -> Problem | None:
    known = facts_of(spec.model)
    if known is None or spec.data.kind not in BYTE_DATA or known.vocabulary >= BYTES:
        return None
    return Problem(
        asked=f'a vocabulary of {known.vocabulary} with data.kind = "{spec.data.kind}"',
        found=f"text as bytes, which has {BYTES} different tokens",
        why=f"tokens from {known.vocabulary} up would have no embedding",
        instead=f"--set model.args.vocab_size={BYTES}",
    )


def _translated(style: str) -> bool:
    """Whether it is a rule here; a gathered output is one of the head alone, and this plan is of what is before it."""
    return style in STYLES and style not in ("colwise_gather_output", "colwise_rep")


def _cuts(known: Facts, tp: int) -> bool:
    heads = known.heads % tp == 0 and (known.kv_heads % tp == 0 or tp % known.kv_heads == 0)
    rows = -(-known.vocabulary // tp) * (tp - 1) < known.vocabulary
    return heads and rows and (known.hidden is None or known.hidden % tp == 0)


def _refilled(spec: Spec) -> str:
    return " --set layout.dp_replicate=auto" if spec.layout.dp_replicate != "auto" else ""
