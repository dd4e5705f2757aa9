"""Every rule has a Spec that breaks it, and its advice mends that Spec."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence

import pytest

from fourfold.spec.draft import Draft
from fourfold.spec.errors import SpecError
from fourfold.spec.load import load_spec
from fourfold.spec.ready import ready_text
from fourfold.spec.rules import RULES, Rule, check, place_of, require
from fourfold.spec.settings import parse_settings
from fourfold.spec.spec import Spec

BY_NAME = {rule.name: rule for rule in RULES}
MOE = "model.moe={experts=6,top_k=2}"
MLA = "model.mla={kv_rank=8,nope_head_width=8,rope_head_width=8,value_head_width=8}"
NO_KV = "model={layers=4,width=64,heads=4}"
FOUR = "batch.accumulation=4"
MLP = ("model.kind=mlp", "data.kind=synthetic")
VECTORS = (
    *("model.kind=import", "model.target=a:b"),
    *("data.kind=synthetic", "data.inputs=3", "data.outputs=1", "data.task=regression"),
)
TOKENS = ("data.kind=tokens", "data.path=x")
LLAMA = (
    *("model.kind=huggingface", "model.architecture=llama"),
    "model.args={hidden_size=64,intermediate_size=96,num_hidden_layers=4,num_attention_heads=4,"
    "num_key_value_heads=2,vocab_size=256}",
)
OWN = ("model.kind=import", "model.target=a:b", "data.kind=synthetic")

BROKEN: list[tuple[str, Sequence[str]]] = [
    ("equal groups of heads", ["model.kv_heads=3"]),
    ("equal groups of heads", ["model.kv_heads=8"]),
    ("whole head width", ["model.heads=6"]),
    ("even rotary width", ["model.head_width=5"]),
    ("even rotary width", ["model.width=12"]),
    ("even rotary width", [NO_KV, MLA, "model.mla.rope_head_width=3"]),
    ("position table", ["model.positions=learned"]),
    ("position table", ["model.positions=learned", "model.max_sequence=127"]),
    ("position table", ["model.max_sequence=127"]),
    ("latent attention alone", [MLA]),
    ("latent attention alone", [NO_KV, MLA, "model.positions=learned", "model.max_sequence=128"]),
    ("experts for a token", [MOE, "model.moe.top_k=7"]),
    ("experts for a token", [MOE, "model.moe.first_dense_layers=4"]),
    ("settings of the balance", [MOE, "model.moe.balance_speed=0.1"]),
    ("settings of the balance", [MOE, "model.moe.balance=bias", "model.moe.balance_weight=0.1"]),
    ("capacity for a token", [MOE, "model.moe.capacity_factor=0.001"]),
    ("tp cuts the experts", [MOE, "layout.tp=2", "model.moe.expert_width=5"]),
    (
        "tp cuts the experts",
        [
            MOE,
            "layout.tp=2",
            "layout.ep=2",
            "model.moe={experts=6, top_k=2, shared_experts=1, expert_width=5}",
        ],
    ),
    ("a configuration of transformers", ["model.kind=huggingface"]),
    ("a configuration of transformers", [*LLAMA, "model.architecture=lama"]),
    ("a configuration of transformers", [*LLAMA, "model.architecture=clip_text_model"]),
    ("a configuration of transformers", [*LLAMA, "model.config=nowhere/config.json"]),
    ("a configuration of transformers", ["model.kind=huggingface", "model.config=nowhere/config.json"]),
    ("a configuration of transformers", [*LLAMA, "model.args.hiden_size=32"]),
    ("a configuration of transformers", [*LLAMA, "model.args.hidden_size=wide"]),
    ("a configuration of transformers", [*LLAMA, "model.architecture=mamba", "model.args={}"]),
    ("a configuration of transformers", [*LLAMA, "model.architecture=gemma3", "model.args={}"]),
    ("tokens for a causal LM", [*LLAMA, "data.kind=synthetic"]),
    ("draws that are ours", [*LLAMA, "model.args.attention_dropout=0.1"]),
    ("draws that are ours", [*LLAMA, "model.architecture=gpt2", "model.args={}"]),
    ("attention that is ours", [*LLAMA, "model.architecture=gemma2"]),
    ("attention that is ours", [*LLAMA, 'model.args.rope_parameters={rope_type="dynamic",factor=2.0}']),
    ("attention that is ours", [*LLAMA, "model.architecture=qwen3_next"]),
    ("a loss over rows", [*LLAMA, "model.architecture=mixtral", "model.args.output_router_logits=true"]),
    ("places for every token", [*LLAMA, "model.architecture=gpt2", "model.args={n_positions=64}"]),
    ("a row for every byte", [*LLAMA, "model.args.vocab_size=255"]),
    ("stages of transformers", [*LLAMA, "layout.pp=2"]),
    ("experts of transformers", [*LLAMA, "layout.ep=2"]),
    ("experts of transformers", [*LLAMA, "model.architecture=mixtral", "layout.ep=2"]),
    ("tp by the model's own plan", [*LLAMA, "model.architecture=gpt2", "model.args={}", "layout.tp=2"]),
    ("tp by the model's own plan", [*LLAMA, "model.architecture=mixtral", "layout.tp=2"]),
    ("tp by the model's own plan", [*LLAMA, "model.architecture=phi3", "layout.tp=2"]),
    ("tp cuts the configuration", [*LLAMA, "layout.tp=3"]),
    ("tp cuts the configuration", [*LLAMA, "layout.tp=8"]),
    (
        "tp cuts the configuration",  # report B064: 3 key/value heads on 2 ranks
        [
            *(*LLAMA, "model.args.hidden_size=96", "model.args.num_attention_heads=6"),
            *("model.args.num_key_value_heads=3", "layout.tp=2"),
        ],
    ),
    ("tp cuts the configuration", [*LLAMA, "model.args.intermediate_size=97", "layout.tp=2"]),
    ("cp of latent attention", [*LLAMA, "model.architecture=deepseek_v3", "layout.cp=2"]),
    ("ulysses cuts the configuration", [*LLAMA, "layout.cp=8", "layout.cp_method=ulysses"]),
    ("two classes", [*MLP, "model.task=classification"]),
    ("data of the model's kind", ["model.kind=mlp"]),
    ("data of the model's kind", ["data.kind=synthetic"]),
    ("a token for every byte", ["model.vocabulary=255"]),
    ("sizes of synthetic data", [*MLP, "data.inputs=31"]),
    ("sizes of synthetic data", [*MLP, "data.task=classification"]),
    ("sizes of synthetic data", OWN),
    ("transforms of the data's kind", ['data.transforms=[{kind="gaussian_noise"}]']),
    ("transforms of the data's kind", [*MLP, 'data.transforms=[{kind="token_noise"}]']),
    ("transforms of the data's kind", ['data.transforms=[{kind="import"}]']),
    ("paths named", ["data.kind=text", 'data.path=""']),
    ("paths named", ["data.kind=text", "data.path=x", 'data.validation_path=""']),
    ("a validation set", ["data.validation_fraction=0"]),
    ("one auto degree", ["layout.dp_shard=auto", "layout.zero=1"]),
    ("zero shards", ["layout.dp_shard=2"]),
    ("units of zero", ["layout.wrap=2"]),
    ("units of zero", ["layout.wrap=model"]),
    ("units of blocks", ["layout.zero=3", "layout.wrap=5"]),
    ("units of blocks", [*MLP, "layout.zero=1", "layout.wrap=5"]),
    ("prefetch of zero 3", ["layout.prefetch=1"]),
    ("prefetch of zero 3", ["layout.zero=2", "layout.prefetch=1"]),
    ("units to prefetch", ["layout.zero=3", "layout.prefetch=5"]),
    ("units to prefetch", ["layout.zero=3", "layout.wrap=3", "layout.prefetch=3"]),
    ("units to prefetch", ["layout.zero=3", "layout.wrap=model", "layout.prefetch=1"]),
    ("offload of zero", ["layout.offload=cpu"]),
    ("files to offload to", ["layout.offload_dir=x"]),
    ("files to offload to", ["layout.zero=1", "layout.offload=cpu", "layout.offload_dir=x"]),
    ("files to offload to", ["layout.offload=disk", 'layout.offload_dir=" "']),
    ("operations to keep", ["layout.recompute=selective", 'layout.recompute_keep=["matmul"]']),
    ("operations to keep", ["layout.recompute=selective", 'layout.recompute_keep=["mm", "atention"]']),
    ("operations to keep", ['layout.recompute_keep=["norm"]']),
    ("operations to keep", ["layout.recompute=selective", 'layout.recompute_keep=["mm", "mm"]']),
    ("some operation to keep", ["layout.recompute=selective", "layout.recompute_keep=[]"]),
    ("operations kept when recomputing", ['layout.recompute_keep=["mm"]']),
    ("operations kept when recomputing", ["layout.recompute=full", "layout.recompute_keep=[]"]),
    ("a backend that compiles", ["layout.compile_backend=aot_eager"]),
    ("operations of compiled blocks", ["layout.recompute=selective", "layout.compile=blocks"]),
    (
        "one backward of compiled blocks",
        ["layout.compile=blocks", "layout.pp=2", 'layout.pp_schedule="zbv"'],
    ),
    ("zero over shards", ["layout.zero=1", "layout.dp_replicate=2"]),
    ("sp needs tp", ["layout.sp=true"]),
    ("sp needs tp", ["layout.sp=true", "model.ffn_width=66"]),
    ("sp needs tokens", [*MLP, "layout.tp=2", "layout.sp=true"]),
    ("sp needs tokens", [*VECTORS, "layout.tp=2", "layout.sp=true"]),
    ("cp needs tokens", [*MLP, "layout.cp=2"]),
    ("cp needs tokens", [*VECTORS, "layout.cp=2"]),
    ("cp cuts the sequence", ["layout.cp=3"]),
    ("cp cuts the sequence", ["layout.cp=2", "data.sequence=126"]),
    ("cp cuts the sequence", ["layout.cp=2", "data.sequence=1"]),
    ("ulysses cuts the heads", ["layout.cp=8", "layout.cp_method=ulysses"]),
    ("ulysses cuts the heads", ["layout.cp=4", "layout.tp=2", "layout.cp_method=ulysses"]),
    (
        "ulysses cuts the heads",
        ["model.heads=12", "model.kv_heads=6", "model.width=96", "layout.cp=4", "layout.cp_method=ulysses"],
    ),
    ("ep needs experts", ["layout.ep=2"]),
    ("ep needs experts", [MOE, "layout.ep=4"]),
    ("tp keeps heads whole", ["layout.tp=3"]),
    ("tp keeps heads whole", ["layout.tp=8"]),
    ("tp keeps heads whole", ["model.heads=12", "model.kv_heads=6", "model.width=96", "layout.tp=4"]),
    ("tp cuts the feed-forward", ["layout.tp=4", "model.ffn_width=66"]),
    ("tp cuts the feed-forward", ["model.width=12", "model.heads=3", "model.kv_heads=3", "layout.tp=3"]),
    ("tp cuts the mlp", [*MLP, "model.hidden=9", "layout.tp=2"]),
    ("tp cuts the mlp", [*MLP, "model.hidden=9", "layout.tp=12"]),
    ("tokens for every tp rank", [*TOKENS, "model.vocabulary=5", "layout.tp=4"]),
    ("tokens for every tp rank", [*TOKENS, "model.vocabulary=1", "layout.tp=2"]),
    ("a layer for every rank of a pipeline", ["layout.pp=5"]),
    ("a layer for every stage", ["layout.pp=4", 'layout.pp_schedule="zbv"']),
    ("a layer for every stage", ["layout.pp=2", 'layout.pp_schedule="looped-bfs"', "layout.pp_virtual=3"]),
    ("a layer for every rank of a pipeline", [*MLP, "layout.pp=5"]),
    ("stages of the schedule", ["layout.pp=2", "layout.pp_virtual=2"]),
    (
        "stages of the schedule",
        ["layout.pp=2", "layout.pp_virtual=3", 'layout.pp_schedule="zbv"', "model.layers=6"],
    ),
    ("a stage for every layer", ["layout.pp=2", "layout.pp_split=[1,2]"]),
    ("a stage for every layer", ["layout.pp=2", "layout.pp_split=[1,1,2]"]),
    (
        "parameters of split backwards",
        ["layout.pp=2", "layout.zero=3", 'layout.pp_schedule="dualpipe-v"', FOUR],
    ),
    (
        "microbatches of the schedule",
        ["layout.pp=2", 'layout.pp_schedule="dualpipe-v"', "batch.accumulation=3"],
    ),
    (
        "microbatches of the schedule",
        ["layout.pp=2", 'layout.pp_schedule="interleaved-1f1b"', "batch.accumulation=5"],
    ),
    ("schedule inside the run", ["optimizer.decay_steps=10"]),
    ("schedule inside the run", ["optimizer.schedule=wsd", "optimizer.decay_steps=181"]),
    ("loss scale of fp16", ["precision.scale_start=2.0"]),
    ("TF32 of CUDA", ["precision.tf32=true", "hardware.device=cpu"]),
    ("TF32 of CUDA", ["precision.tf32=true", "precision.compute=fp64"]),
    ("reduction in fp64", ["precision.compute=fp64", "precision.reduce=bf16"]),
    (
        "reduction of replicas",
        ["precision.reduce=bf16", "layout.dp_replicate=2", "layout.dp_shard=2", "layout.zero=1"],
    ),
    ("reduction of replicas", ["precision.reduce=bf16", "layout.dp_replicate=2", "layout.tp=2"]),
    ("betas below one", ["optimizer.betas=[0.9, 1.0]"]),
    ("seed of 63 bits", [f"run.seed={2**63}"]),
    ("run.dir named", ['run.dir=" "']),
    ("tensors by their whole names", ['checkpoint.allow_missing=["model.a", "head.*"]']),
    ("tensors by their whole names", ['checkpoint.allow_surplus=["*"]']),
    ("tensors by their whole names", ['checkpoint.allow_missing=["model."]']),
    ("tensors by their whole names", ['checkpoint.allow_missing=["optimizer.", "model.a"]']),
    ("tensors by their whole names", ['checkpoint.allow_surplus=["rank0.torch"]']),
    ("model.mla not trained yet", [NO_KV, MLA]),
    ("model.mtp_layers not trained yet", ["model.mtp_layers=1"]),
    ("exact without tp", ["run.exact=true", "layout.tp=2"]),
    ("exact without pp", ["run.exact=true", "layout.pp=2"]),
    ("exact without cp", ["run.exact=true", "layout.cp=2"]),
    ("exact without ep", [MOE, "run.exact=true", "layout.dp_shard=2", "layout.ep=2"]),
    ("exact on powers of two", ["run.exact=true", "layout.dp_replicate=3"]),
    ("exact on powers of two", ["run.exact=true", "layout.dp_replicate=2", "layout.dp_shard=6"]),
    ("exact in wide sums", ["run.exact=true", "precision.compute=bf16", "precision.reduce=bf16"]),
]

LEGAL: list[Sequence[str]] = [
    [],
    ["model.kv_heads=4"],
    ["model.heads=6", "model.kv_heads=2", "model.head_width=10"],
    ["model.positions=learned", "model.max_sequence=128"],
    ["model.width=12", "model.positions=learned", "model.max_sequence=200"],
    [NO_KV, MLA],
    [MOE, "layout.ep=3", "model.moe.top_k=6", "model.moe.first_dense_layers=3"],
    [*MLP, "data.inputs=32", "model.task=classification", "model.outputs=2"],
    [*OWN, "data.inputs=3", "data.outputs=1", "data.task=regression"],
    ["model.kind=import", "model.target=a:b"],
    [MOE, "layout.tp=2", "layout.ep=2", "model.moe.expert_width=5"],  # whole experts on each rank
    [MOE, "model.moe.balance=bias", "model.moe.balance_speed=0.1", "model.moe.capacity_factor=0.1"],
    ["data.validation_fraction=0", "run.validate_every=0"],
    ["data.kind=text", "data.path=x", "data.validation_path=y", "data.validation_fraction=0"],
    ["data.kind=tokens", "data.path=x", "model.vocabulary=100"],
    ["layout.dp_shard=auto", "layout.dp_replicate=1"],
    ["layout.tp=4", "layout.sp=true", "layout.pp=4"],
    ["layout.pp=2", 'layout.pp_schedule="interleaved-1f1b"', "layout.pp_virtual=1", "batch.accumulation=4"],
    ["layout.pp=2", "layout.pp_split=[3,1]", 'layout.pp_schedule="gpipe"'],
    ['layout.pp_schedule="zbv"', "layout.pp_virtual=7", "layout.zero=3"],  # of a pipeline that is not there
    ["layout.tp=2", "layout.sp=true", "data.sequence=127"],  # unequal slices
    ["layout.tp=2", "model.width=63", "model.head_width=16"],  # no tensor is cut over the width
    ["layout.tp=4", "model.vocabulary=257"],
    [*TOKENS, "layout.tp=4", "model.vocabulary=7"],
    [*MLP, "layout.tp=2", "model.inputs=3", "model.outputs=5"],
    LLAMA,
    [*LLAMA, "layout.tp=4", "layout.sp=true", "layout.cp=2", "layout.zero=3", "layout.dp_replicate=1"],
    [*LLAMA, "layout.tp=4", "model.args.num_key_value_heads=1"],
    [*LLAMA, "layout.cp=4", "layout.cp_method=ulysses"],
    [*VECTORS, "layout.tp=7"],  # known once it is built
    ["layout.zero=1", "layout.dp_replicate=1"],  # of one rank: nothing to do, and no harm
    ["layout.zero=1", "layout.dp_replicate=2", "layout.cp=2"],  # zero shards over cp, too
    ["layout.cp=2", "data.sequence=4"],
    ["layout.cp=4", "layout.cp_method=ulysses"],  # four heads; two key/value heads, each on two ranks
    ["layout.cp=64", "layout.cp_method=ring"],
    ["layout.zero=2", "layout.wrap=4", "layout.offload=cpu"],
    ["layout.zero=3", "layout.wrap=2", "layout.prefetch=2", "layout.offload=disk", "layout.offload_dir=x"],
    ["layout.zero=1", "layout.wrap=model", "layout.offload=disk"],
    ["layout.recompute=full"],
    ["layout.recompute=full", "layout.compile=blocks", "layout.compile_backend=aot_eager"],
    ["run.exact=true", "layout.compile=blocks"],
    ["layout.compile=blocks", "layout.pp=2"],
    ["layout.recompute=full", "layout.pp=2", 'layout.pp_schedule="zbv"'],
    ["layout.recompute=selective", "layout.pp=2"],
    [MOE, "layout.pp=2", "layout.tp=2", "layout.ep=2"],
    ["layout.recompute=selective", 'layout.recompute_keep=["collective", "bmm", "convolution"]'],
    ["run.steps=20"],
    ["run.steps=1"],
    ["optimizer.schedule=wsd", "optimizer.decay_steps=180"],
    [f"run.seed={2**63 - 1}", "run.dir=x"],
    ['data.transforms=[{kind="token_noise", probability=0.1}, {kind="import", target="a:b"}]'],
]


def spec_of(*sets: str) -> Spec:
    """tiny with `sets`, whatever rules it breaks."""
    text = ready_text("tiny")
    draft = Draft.of_text(tomllib.loads(text), text, "tiny.toml")
    settings, unreadable = parse_settings(sets)
    assert not unreadable
    for setting in settings:
        draft.apply(setting)
    draft.raw.setdefault("name", "tiny")
    draft.raw["model"].setdefault("kind", "decoder")
    return Spec.model_validate(draft.raw)


def advice(instead: str) -> list[list[str]]:
    """The settings of each way out that is spelt as one or more `--set`."""
    ways = [way for part in instead.split(" or ") for way in part.split(", ")]
    return [
        shlex.split(way.partition("--set ")[2].replace("--set ", ""))
        for way in ways
        if way.startswith("--set ")
    ]


def test_every_rule_is_broken_here() -> None:
    assert {name for name, _ in BROKEN} == set(BY_NAME)
    assert len(BY_NAME) == len(RULES)


@pytest.mark.parametrize(("name", "sets"), BROKEN)
def test_broken(name: str, sets: Sequence[str]) -> None:
    rule, spec = BY_NAME[name], spec_of(*sets)
    assert rule.applies(spec)
    problem = rule.problem(spec)
    assert problem.asked
    assert problem.found
    assert problem.why
    assert problem.instead
    assert problem.asked in [each.asked for each in check(spec)]
    for way in advice(problem.instead):
        assert not rule.applies(spec_of(*sets, *way)), way


@pytest.mark.parametrize("sets", LEGAL)
def test_legal(sets: Sequence[str]) -> None:
    assert check(spec_of(*sets), "always") == []


def test_train_asks_more_than_always() -> None:
    spec = spec_of("model.mtp_layers=1")
    assert check(spec, "always") == []
    require(spec, "always")
    with pytest.raises(SpecError, match="multi-token prediction, which is planned for but not trained yet"):
        require(spec)
    assert check(spec_of()) == []


def test_all_at_once() -> None:
    spec = spec_of(
        "model.kv_heads=3", "layout.sp=true", "run.seed=99999999999999999999", "model.mtp_layers=1"
    )
    with pytest.raises(SpecError) as caught:
        require(spec)
    assert [problem.asked.split(" = ")[0] for problem in caught.value.problems] == [
        "model.kv_heads",
        "layout.sp",
        "run.seed",
        "train with model.mtp_layers",
    ]


def test_place_of_the_later_setting() -> None:
    provenance = {"model.width": "my.toml:3", "model.heads": "--set #1", "model.moe.experts": "my.toml:9"}
    assert place_of(("model.width", "model.heads"), provenance) == "--set #1"
    assert place_of(("model.width",), provenance) == "my.toml:3"
    assert place_of(("model.moe",), provenance) == "my.toml:9"
    assert place_of(("run.seed",), provenance) == ""


def test_a_rule_that_does_not_apply_has_no_problem() -> None:
    rule = Rule("never", (), lambda _: None)
    assert not rule.applies(load_spec("tiny").spec)
    with pytest.raises(AssertionError):
        rule.problem(load_spec("tiny").spec)
