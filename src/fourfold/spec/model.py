"""What is trained: `[model]`. Counts are per model; widths are features of one token."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from fourfold.spec.value import Value

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class MoeSpec(Value):
    """`[model.moe]`: routed experts in place of the feed-forward."""

    experts: PositiveInt
    top_k: PositiveInt
    shared_experts: int = Field(default=0, ge=0)
    expert_width: PositiveInt | None = None  # hidden features of one expert; default: ffn_width
    first_dense_layers: int = Field(default=0, ge=0)  # leading layers with a plain feed-forward
    router: Literal["softmax", "sigmoid"] = "softmax"  # what makes scores of the router's outputs
    # How tokens are spread evenly: by an auxiliary loss, or by a correction of the scores, moved after each step.
    balance: Literal["none", "loss", "bias"] = "loss"
    balance_weight: Annotated[float, Field(ge=0.0)] | None = None  # of the auxiliary loss; default: 0.01
    balance_speed: Annotated[float, Field(gt=0.0)] | None = (
        None  # of the correction, in each step; default: 0.001
    )
    # What an expert takes of a row at most, in equal shares of its choices; default: no limit, no token is dropped.
    capacity_factor: Annotated[float, Field(gt=0.0)] | None = None


class MlaSpec(Value):
    """`[model.mla]`: latent attention, DeepSeek-V2 (arXiv 2405.04434) section 2.1 (planned for; not trained yet)."""

    q_rank: PositiveInt | None = None
    kv_rank: PositiveInt
    nope_head_width: PositiveInt
    rope_head_width: PositiveInt
    value_head_width: PositiveInt


class DecoderSpec(Value):
    """A decoder-only transformer."""

    kind: Literal["decoder"] = "decoder"
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt | None = None  # default: heads
    head_width: PositiveInt | None = None  # default: width / heads
    ffn_width: PositiveInt | None = None  # default: see spec.widths.default_ffn_width
    vocabulary: PositiveInt = 256
    tied: bool = False
    biases: bool = False
    dropout: Probability = 0.0
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: Annotated[float, Field(gt=0.0)] = 10000.0
    max_sequence: PositiveInt | None = None  # rows of the learned position table
    ffn: Literal["swiglu", "gelu"] = "swiglu"
    init_std: Annotated[float, Field(gt=0.0)] = 0.02
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    mtp_layers: int = Field(default=0, ge=0)  # multi-token-prediction layers (planned for; not trained yet)


class MlpSpec(Value):
    """A multilayer perceptron for regression or classification on vectors."""

    kind: Literal["mlp"]
    inputs: PositiveInt = 32
    hidden: PositiveInt = 64
    layers: PositiveInt = 2  # hidden layers
    outputs: PositiveInt = 1  # targets of a regression, or classes
    task: Literal["regression", "classification"] = "regression"
    dropout: Probability = 0.0
    biases: bool = True


class ImportSpec(Value):
    """A user's own model: `target = "package.module:factory"`, called with `args` (see docs/own_model.md)."""

    kind: Literal["import"]
    target: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    args: dict[str, Any] = Field(default_factory=dict)


class HuggingFaceSpec(Value):
    """A causal LM of transformers, built from a configuration with random values (see docs/hugging_face.md)."""

    kind: Literal["huggingface"]
    architecture: Annotated[str, Field(min_length=1)] | None = (
        None  # a model_type of transformers, as "llama"
    )
    config: Annotated[str, Field(min_length=1)] | None = None  # a config.json, or the folder that holds one
    args: dict[str, Any] = Field(default_factory=dict)  # keys of the configuration, on top of it


ModelSpec = Annotated[DecoderSpec | MlpSpec | ImportSpec | HuggingFaceSpec, Field(discriminator="kind")]
