"""Models of transformers on one device: its loss, our documents, initial values, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from fourfold.models.draws import normal
from fourfold.models.hf_wide import _Wide
from fourfold.models.huggingface import HuggingFaceKit
from fourfold.models.protocol import Heads, Start, parameter_rules
from fourfold.spec.errors import SpecError
from fourfold.spec.huggingface import configuration, facts, vocabulary_of
from fourfold.spec.model import HuggingFaceSpec
from tests.models.hf_models import ARGS, SMALL, kit_for, spec_for


def theirs(spec):
    """transformers' own model, as it makes it, in fp64."""
    from transformers import AutoModelForCausalLM

    config = configuration(spec)
    config.pad_token_id, config._experts_implementation = None, "eager"
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float64)


@pytest.mark.parametrize("architecture", ARGS)
def test_the_loss_is_that_of_transformers(tokens, architecture):
    kit = kit_for(architecture)
    module = kit.build(3, torch.float64)
    own = theirs(spec_for(architecture))
    own.load_state_dict(module.state_dict())
    batch = tokens([[13], [13]])
    total, count = kit.loss(module, batch)
    ids = torch.cat([batch.inputs, torch.zeros(2, 1, dtype=torch.int64)], 1)
    labels = torch.cat([ids[:, :1], batch.targets.where(batch.valid, -100)], 1)  # it shifts them itself
    with _Wide():
        expected = own(input_ids=ids, labels=labels, use_cache=False).loss
    assert float((total / count).detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    total.backward()
    (expected * count).backward()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_a_document_does_not_see_the_others_of_its_row(tokens, architecture):
    kit = kit_for(architecture)
    module = kit.build(3, torch.float64)
    packed = tokens([[5, 8]])
    total, count = kit.loss(module, packed)
    alone = torch.zeros((), dtype=torch.float64)
    for first, beyond in ((0, 5), (5, 13)):
        one = tokens([[beyond - first]])
        part = {key: getattr(packed, key)[:, first:beyond] for key in ("inputs", "targets", "valid")}
        for key, value in part.items():
            object.__setattr__(one, key, value)
        alone = alone + kit.loss(module, one)[0]
    assert count == 11 and float(total.detach()) == pytest.approx(float(alone.detach()), rel=1e-13)
    across = HuggingFaceKit(spec_for(architecture), attend_across=True)
    assert abs(float((across.loss(module, packed)[0] - total).detach())) > 1e-3


def test_a_window_is_heeded(tokens):
    def loss(window):
        kit = kit_for("mistral", sliding_window=window)
        return float(kit.loss(kit.build(3, torch.float64), tokens([[13]]))[0].detach())

    assert abs(loss(3) - loss(None)) > 1e-3
    assert loss(13) == pytest.approx(loss(None), rel=1e-14)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["gpt2", "gemma3_text", "mixtral"])
def test_values_start_as_transformers_says_and_by_name(architecture):
    kit, spec = kit_for(architecture, hidden_size=64), spec_for(architecture, hidden_size=64)
    module = kit.build(5, torch.float64)
    own = theirs(spec)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in own.named_parameters()]
    for name, parameter in own.named_parameters():
        mean, std = kit.start(name)
        assert abs(float(parameter.mean()) - mean) <= 5 * std / parameter.numel() ** 0.5, name
        assert float(parameter.std()) == pytest.approx(std, rel=0.25, abs=1e-12), name
        if std:
            values = normal(5, name, parameter.shape, std, torch.float64) + mean
            assert torch.equal(module.get_parameter(name), values)
    for name, buffer in own.named_buffers():
        torch.testing.assert_close(module.get_buffer(name).float(), buffer.float())
    assert all(p.is_meta for p in kit.skeleton(torch.float32).parameters())


def test_a_scaled_start_of_gpt2_and_a_tie():
    kit = kit_for("gpt2")
    assert kit.start("transformer.h.0.attn.c_proj.weight") == Start(0.0, 0.3 / 2)  # sqrt(2 × 2 layers)
    module = kit.build(0, torch.float32)
    assert module.lm_head.weight is module.transformer.wte.weight
    assert kit.blocks(module) == ("transformer.h.0", "transformer.h.1")


def test_the_table_is_the_plan_with_whole_heads():
    kit = kit_for("qwen3")
    rules = parameter_rules(kit, kit.skeleton(torch.float32))
    block = "model.layers.1"
    assert rules[f"{block}.self_attn.q_proj.weight"] == Heads(4)
    assert rules[f"{block}.self_attn.k_proj.weight"] == Heads(2)
    assert rules[f"{block}.self_attn.q_norm.weight"] == "within heads"
    assert rules[f"{block}.self_attn.o_proj.weight"] == "row"
    assert rules[f"{block}.mlp.up_proj.weight"] == Heads(24)
    assert rules["model.norm.weight"] == "replicate"
    assert rules["lm_head.weight"] == rules["model.embed_tokens.weight"] == "vocabulary"
    assert kit_for("gpt2").sharding() == {"*": "replicate"}
    with pytest.raises(SpecError, match="in its plan for"):
        kit_for("phi3").sharding()


@pytest.mark.parametrize(
    ("architecture", "more", "text"),
    [
        ("bloom", {}, "0 of 2 layers attend by transformers' table"),
        ("falcon", {}, "does not go by transformers' table"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 4}, "it is to heed s_aux"),
        ("stablelm", {}, "it would see across documents"),
    ],
)
def test_attention_that_ours_cannot_stand_in_for(tokens, architecture, more, text):
    plain = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    args = plain if architecture in ("bloom", "falcon") else {**SMALL, **more}
    kit = HuggingFaceKit(HuggingFaceSpec(kind="huggingface", architecture=architecture, args=args))
    with pytest.raises(SpecError, match=text):
        kit.loss(kit.build(0, torch.float64), tokens([[5, 8]]))


def test_a_configuration_from_a_file(tmp_path, tokens):
    whole = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **SMALL}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    of_folder = HuggingFaceSpec(kind="huggingface", config=str(tmp_path))
    of_file = HuggingFaceSpec(
        kind="huggingface", config=str(tmp_path / "config.json"), args={"num_hidden_layers": 3}
    )
    assert facts(of_folder).layers == 2 and facts(of_file).layers == 3
    assert vocabulary_of(of_file) == ("model.args.vocab_size", 61)
    kit = HuggingFaceKit(of_file)
    module = kit.build(0, torch.float32)
    assert len(kit.blocks(module)) == 3 and {p.dtype for p in module.parameters()} == {torch.float32}
    assert torch.isfinite(kit.loss(module, tokens([[13]]))[0].detach())


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{", "it is no JSON"),
        ("[1]", "it is no object of keys"),
        ('{"hidden_size": 16}', "no model_type in it"),
        ('{"model_type": "lama"}', '"model_type": "llama" in the file'),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "quantization_config"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, written, text):
    path = tmp_path / "config.json"
    path.write_text(written)
    with pytest.raises(SpecError, match=text):
        configuration(HuggingFaceSpec(kind="huggingface", config=str(path)))


def test_without_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else find(name, *more)
    )
    with pytest.raises(SpecError, match=r"pip install 'fourfold\[hf\]'") as caught:
        configuration(spec_for("llama"))
    assert caught.value.exit_code == 2


def test_nobody_else_imports_transformers():
    script = (
        "import sys, fourfold.models.registry, fourfold.train.setup, fourfold.verify.equal as _;"
        "from fourfold.spec.load import load_spec; load_spec('tiny');"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
