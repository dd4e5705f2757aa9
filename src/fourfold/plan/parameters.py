"""How many parameters a model has: one function per term; every figure is a count of parameters.

The modules assumed, which `fourfold.models` builds (h = width, V = vocabulary; norm = RMSNorm with a weight, or
LayerNorm with weight and bias; a Linear has a bias only where said):

  decoder       embedding V × h; with learned positions a table max_sequence × h; blocks; a final norm; a head
                V × h without bias unless tied.
  block         norm, attention, norm, feed-forward.
  attention     separate q, k and v projections and an output projection, all with biases if `biases`.
  feed-forward  swiglu: gate, up, down; gelu: up, down; all with biases if `biases`.
  moe           in place of the feed-forward after `first_dense_layers` blocks: a router h → experts without
                bias; with balance = "bias" one correction per expert, moved by load and not by a gradient;
                routed experts, each a feed-forward of expert_width; shared experts, one feed-forward of their
                joint width.
  mla           latent attention: q through q_rank and a norm (or directly), k and v through kv_rank and a
                norm, a rotary key shared by the heads; biases, if any, on down-projections and output.
  mtp           per layer: two norms, a projection 2h → h without bias, a block of the last kind, a norm;
                embedding and head are the main model's.
  mlp           Linear inputs → hidden, hidden → hidden up to `layers` hidden layers, hidden → outputs, all
                with biases if `biases`; no norms.

Sources of shapes: GPT-2 (openai/gpt-2), Llama 3 (arXiv 2407.21783, table 3), Mixtral (arXiv 2401.04088,
table 1), DeepSeek-V3 (arXiv 2412.19437, sections 2.1, 2.2, 4.2, and README_WEIGHTS.md beside its weights).
The tests recompute each published count exactly. DeepSeek-V3's 671,026,419,200 counts the router's
corrections (256 × 58 = 14,848), for its own code holds them as nn.Parameter and its checkpoint as tensors;
without them it is 671,026,404,352.
"""

from __future__ import annotations

from fourfold.spec.errors import Problem, SpecError
from fourfold.spec.model import DecoderSpec, HuggingFaceSpec, ImportSpec, MlaSpec, MlpSpec, ModelSpec, MoeSpec
from fourfold.spec.widths import expert_width, ffn_width, head_width, shared_width

CORRECTION = "router correction"  # the one term no gradient moves


def count_parameters(model: ModelSpec) -> int | None:
    """Parameters of the whole model on one device, each tied tensor once; None where only building it tells.

    Raises SpecError for learned positions without `max_sequence`.
    """
    terms = parameter_terms(model)
    return None if terms is None else sum(terms.values())


def parameter_terms(model: ModelSpec) -> dict[str, int] | None:
    """Parameters by term, in order of execution, without those the model lacks; None where only building it tells."""
    if isinstance(model, ImportSpec | HuggingFaceSpec):
        return None
    terms = _mlp_terms(model) if isinstance(model, MlpSpec) else _decoder_terms(model)
    return {name: count for name, count in terms.items() if count}


def linear(inputs: int, outputs: int, bias: bool) -> int:
    """A Linear: inputs × outputs, and outputs more with a bias."""
    return inputs * outputs + (outputs if bias else 0)


def norm(features: int, kind: str) -> int:
    """RMSNorm: a weight; LayerNorm: a weight and a bias."""
    return features * (2 if kind == "layernorm" else 1)


def embedding(model: DecoderSpec) -> int:
    """Token table: vocabulary × width."""
    return model.vocabulary * model.width


def positions(model: DecoderSpec) -> int:
    """Learned position table: max_sequence × width; rotary positions have no parameters."""
    if model.positions == "rotary":
        return 0
    if model.max_sequence is None:
        raise SpecError(
            Problem(
                asked='model.positions = "learned"',
                found="no model.max_sequence",
                why="the position table has one row for each place in the longest sequence",
                instead="--set model.max_sequence=1024 (at least data.sequence)",
            )
        )
    return model.max_sequence * model.width


def attention(model: DecoderSpec) -> int:
    """Attention of one block: q, k, v and output projections (grouped-query: k and v have kv_heads heads)."""
    if model.mla is not None:
        return latent_attention(model, model.mla)
    queries = model.heads * head_width(model)
    keys = (model.kv_heads or model.heads) * head_width(model)
    return (
        linear(model.width, queries, model.biases)
        + 2 * linear(model.width, keys, model.biases)
        + linear(queries, model.width, model.biases)
    )


def latent_attention(model: DecoderSpec, mla: MlaSpec) -> int:
    """Latent attention of one block. Source: arXiv 2412.19437, section 2.1.1, equations 1–11."""
    query_width = mla.nope_head_width + mla.rope_head_width
    queries = model.heads * query_width
    if mla.q_rank is None:
        query = linear(model.width, queries, bias=False)
    else:
        query = linear(model.width, mla.q_rank, model.biases) + norm(mla.q_rank, model.norm)
        query += linear(mla.q_rank, queries, bias=False)
    latent = mla.kv_rank + mla.rope_head_width
    down = linear(model.width, latent, model.biases) + norm(mla.kv_rank, model.norm)
    up = linear(mla.kv_rank, model.heads * (mla.nope_head_width + mla.value_head_width), bias=False)
    return query + down + up + linear(model.heads * mla.value_head_width, model.width, model.biases)


def feed_forward(model: DecoderSpec, hidden: int) -> int:
    """A feed-forward of `hidden` features: gate, up and down (swiglu) or up and down (gelu)."""
    inward = 2 if model.ffn == "swiglu" else 1
    return inward * linear(model.width, hidden, model.biases) + linear(hidden, model.width, model.biases)


def router(model: DecoderSpec, moe: MoeSpec) -> int:
    """Router of one mixture layer: width × experts."""
    return linear(model.width, moe.experts, bias=False)


def router_correction(moe: MoeSpec) -> int:
    """One value per routed expert where they balance it. Source: arXiv 2412.19437, equation 16."""
    return moe.experts if moe.balance == "bias" else 0


def routed_experts(model: DecoderSpec, moe: MoeSpec) -> int:
    """All routed experts of one mixture layer."""
    return moe.experts * feed_forward(model, expert_width(model))


def shared_experts(model: DecoderSpec, moe: MoeSpec) -> int:
    """The shared experts of one mixture layer, as one feed-forward of their joint width."""
    return feed_forward(model, shared_width(model)) if moe.shared_experts else 0


def head(model: DecoderSpec) -> int:
    """Output head: width × vocabulary, or nothing where it is tied to the embedding."""
    return 0 if model.tied else linear(model.width, model.vocabulary, bias=False)


def _decoder_terms(model: DecoderSpec) -> dict[str, int]:
    moe = model.moe
    dense_layers = model.layers if moe is None else min(moe.first_dense_layers, model.layers)
    terms = {
        "embedding": embedding(model),
        "positions": positions(model),
        **_block_terms(model, dense=dense_layers, mixture=model.layers - dense_layers),
    }
    terms["norms"] += norm(model.width, model.norm)
    terms["head"] = head(model)
    if model.mtp_layers:
        joined = 3 * norm(model.width, model.norm) + linear(2 * model.width, model.width, bias=False)
        block = _block_terms(model, dense=0 if moe else 1, mixture=1 if moe else 0)
        terms[CORRECTION] += model.mtp_layers * block.pop(CORRECTION)
        terms["multi-token prediction"] = model.mtp_layers * (joined + sum(block.values()))
    return terms


def _block_terms(model: DecoderSpec, dense: int, mixture: int) -> dict[str, int]:
    """Parameters of `dense` blocks with a feed-forward and `mixture` blocks with experts."""
    terms = {
        "attention": (dense + mixture) * attention(model),
        "norms": (dense + mixture) * 2 * norm(model.width, model.norm),
        "feed-forward": dense * feed_forward(model, ffn_width(model)),
        "router": 0,
        CORRECTION: 0,
        "routed experts": 0,
        "shared experts": 0,
    }
    if mixture and model.moe is not None:
        terms["router"] = mixture * router(model, model.moe)
        terms[CORRECTION] = mixture * router_correction(model.moe)
        terms["routed experts"] = mixture * routed_experts(model, model.moe)
        terms["shared experts"] = mixture * shared_experts(model, model.moe)
    return terms


def _mlp_terms(model: MlpSpec) -> dict[str, int]:
    return {
        "input": linear(model.inputs, model.hidden, model.biases),
        "hidden": (model.layers - 1) * linear(model.hidden, model.hidden, model.biases),
        "output": linear(model.hidden, model.outputs, model.biases),
    }
